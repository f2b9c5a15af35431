"""Credentials and endpoints from the environment and from configuration files, on every engine; nothing is frozen."""

from __future__ import annotations

import pickle
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from ckptstore import open_store
from ckptstore.errors import AccessDenied, InvalidInput, StorageError
from ckptstore.storage.open import open_storage
from ckptstore.testing.s3.objects import S3Error
from ckptstore.testing.s3_server import Fault, S3Server, s3_server

pytestmark = pytest.mark.slow


def roundtrip(uri: str, engine: str | None, **keywords: Any) -> None:
    storage = open_storage(uri, engine=engine, **keywords)
    storage.write("k", [memoryview(b"1")])
    assert storage.read("k") == b"1"
    again = pickle.loads(pickle.dumps(storage))
    assert again.read("k") == b"1"
    for opened in (storage, again):
        opened.close()


def test_keys_that_change_are_looked_up_anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A pickle carries no key: what the new process finds counts."""
    path = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(path))
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    path.write_text("[default]\naws_access_key_id = old\naws_secret_access_key = s\n")
    with s3_server(buckets=["test"], access_keys=["new"]) as server:
        options = {"endpoint_url": server.endpoint_url}
        storage = open_storage("s3://test/x", storage_options=options)
        with pytest.raises(AccessDenied, match="InvalidAccessKeyId"):
            storage.write("k", [memoryview(b"1")])
        frozen = pickle.dumps(storage)
        path.write_text("[default]\naws_access_key_id = new\naws_secret_access_key = s\n")
        again = pickle.loads(frozen)
        again.write("k", [memoryview(b"1")])
        for opened in (storage, again):
            opened.close()
    assert b"old" not in frozen


def test_no_credentials_are_a_clear_error(fast_s3: S3Server) -> None:
    options = {"endpoint_url": fast_s3.endpoint_url, "client_kwargs": {"region_name": "us-east-1"}}
    storage = open_storage("s3://test/x", storage_options=options)
    with pytest.raises(AccessDenied, match="credentials"):
        storage.read("k")
    storage.close()


def test_anonymous(fast_s3: S3Server) -> None:
    roundtrip("s3://test/x", None, storage_options={"anon": True, "endpoint_url": fast_s3.endpoint_url})


def test_gcs_from_variables(fake_gcs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", fake_gcs.url)
    roundtrip("gs://test/environment", None)


def test_azure_from_variables(azurite: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", azurite.storage_options["connection_string"])
    roundtrip("az://test/environment", None)


@pytest.mark.parametrize("engine", ["native", "fsspec"])
def test_a_region_by_its_short_name(fast_s3: S3Server, engine: str) -> None:
    options = {"key": "k", "secret": "s", "endpoint_url": fast_s3.endpoint_url, "region": "eu-west-9"}
    roundtrip("s3://test/x", engine, storage_options=options)
    if engine != "fsspec":
        with closing(open_storage("s3://test/x", storage_options=options, engine=engine)) as storage:
            assert storage.resolved()["region"].startswith("eu-west-9")
    with pytest.raises(InvalidInput, match="two regions"):
        open_storage("s3://test/x", storage_options={**options, "client_kwargs": {"region_name": "us-east-1"}})


@pytest.mark.parametrize("engine", ["native", "fsspec"])
def test_whoever_has_no_credentials_is_not_told_to_allow_listings(fast_s3: S3Server, engine: str) -> None:
    options = {"endpoint_url": fast_s3.endpoint_url, "client_kwargs": {"region_name": "us-east-1"}}
    fast_s3.faults.add(Fault(action="status", status=403, code="AccessDenied", times=None))
    for more, said in ({"anon": True}, "anon"), ({}, "redentials"):
        with pytest.raises(AccessDenied, match=said) as caught:
            open_store("s3://test/x", storage_options={**options, **more}, engine=engine, group="solo").latest()
        assert "ListBucket" not in str(caught.value)
        assert "list the bucket" not in str(caught.value)


@pytest.mark.parametrize("engine", ["native", "fsspec"])
def test_a_bucket_that_wants_checksums_says_so(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_REQUEST_CHECKSUM_CALCULATION", "when_required")
    with s3_server(buckets=["test"]) as server:

        def refuse(_request: Any) -> None:
            sentence = "Content-MD5 HTTP header is required for Put Object requests with Object Lock parameters"
            raise S3Error(400, "InvalidRequest", f"{sentence} https://host/?X-Amz-Signature=secretsecret")

        monkeypatch.setattr(server.service, "_authorize", refuse)
        with closing(open_storage("s3://test/x", storage_options=server.storage_options, engine=engine)) as storage:
            with pytest.raises(StorageError, match="Content-MD5 HTTP header is required for Put Object") as caught:
                storage.write("k", [memoryview(b"1")])
            assert "secretsecret" not in str(caught.value)
            assert "request_checksum_calculation" in str(caught.value)


def test_fsspecs_own_configuration_counts(fast_s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec

    monkeypatch.setitem(fsspec.config.conf, "s3", fast_s3.storage_options)
    roundtrip("s3://test/configured", "fsspec")


@pytest.mark.parametrize("name", ["a-typo", "client_kwarg"])
def test_an_option_that_nobody_knows_is_refused(fast_s3: S3Server, name: str) -> None:
    options = {**fast_s3.storage_options, name: 1}
    for engine in (None, "fsspec"):
        with pytest.raises(InvalidInput, match="options"):
            open_storage("s3://test/x", storage_options=options, engine=engine)
