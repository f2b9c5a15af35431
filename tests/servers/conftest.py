"""The servers that the object-store tests talk to: on 127.0.0.1, a free port each, one of each kind per session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ckptstore.testing.s3_server import S3Server, s3_server

CLOUD_VARIABLES = ("AWS_", "GOOGLE_", "AZURE_", "STORAGE_EMULATOR_HOST", "FSSPEC_")


@pytest.fixture(autouse=True)
def _no_cloud_of_ones_own(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """No configuration or credentials of the machine, and no question to a metadata service."""
    import os

    for name in list(os.environ):
        if name.startswith(CLOUD_VARIABLES):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent/config")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent/credentials")
    monkeypatch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")


@pytest.fixture(scope="session")
def fast_s3() -> Iterator[S3Server]:
    """The project's own S3 server."""
    with s3_server(buckets=["test"]) as server:
        yield server
