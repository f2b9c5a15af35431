"""The place that a file system of pyarrow stands for is found without asking it for any byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.dirfs import DirFileSystem
from pyarrow.fs import FSSpecHandler, GcsFileSystem, LocalFileSystem, PyFileSystem, S3FileSystem, SubTreeFileSystem

from ckptstore import InvalidInput
from ckptstore.config import StoreConfig
from ckptstore.integrations.ray.filesystem import place_of
from ckptstore.testing.s3_server import s3_server

pytestmark = pytest.mark.slow


def wrapped(system: Any) -> PyFileSystem:
    return PyFileSystem(FSSpecHandler(system))


@pytest.mark.parametrize(
    "filesystem",
    [
        LocalFileSystem(),
        LocalFileSystem(use_mmap=True),
        SubTreeFileSystem("/", LocalFileSystem()),
        wrapped(fsspec.filesystem("file")),
        wrapped(DirFileSystem("/", fsspec.filesystem("file"))),
        SubTreeFileSystem("/", wrapped(fsspec.filesystem("file"))),
    ],
    ids=["local", "mapped", "subtree", "fsspec", "dir", "subtree of fsspec"],
)
def test_a_local_path_stays_one(filesystem: Any, tmp_path: Path) -> None:
    place = place_of(filesystem, str(tmp_path / "run"))
    assert (place.uri, place.storage_options) == (str(tmp_path / "run"), None)


def test_a_directory_of_a_file_system_is_part_of_the_path() -> None:
    inner = DirFileSystem("/mnt/shared", fsspec.filesystem("file"))
    assert place_of(wrapped(inner), "runs/a").uri == "/mnt/shared/runs/a"


def test_s3_keeps_endpoint_region_and_keys() -> None:
    system = S3FileSystem(
        access_key="k", secret_key="s", endpoint_override="127.0.0.1:9000", scheme="http", region="eu-west-1"
    )
    place = place_of(system, "bucket/runs/a")
    assert place.uri == "s3://bucket/runs/a"
    assert place.storage_options == {
        "key": "k",
        "secret": "s",
        "endpoint_url": "http://127.0.0.1:9000",
        "client_kwargs": {"region_name": "eu-west-1"},
    }
    assert "secret" not in repr(place)


def test_options_that_are_given_replace_what_the_file_system_says() -> None:
    place = place_of(S3FileSystem(anonymous=True, region="eu-west-1"), "bucket/a", storage_options={"profile": "p"})
    assert place.storage_options == {"profile": "p"}


def test_options_of_fsspec_are_taken_as_they_are() -> None:
    system = fsspec.filesystem("s3", key="k", secret="s", endpoint_url="http://127.0.0.1:9000", token=None)
    place = place_of(wrapped(system), "bucket/a")
    assert place.uri == "s3://bucket/a"
    assert place.storage_options == {"key": "k", "secret": "s", "endpoint_url": "http://127.0.0.1:9000"}


def test_a_path_of_a_server_stays_whole() -> None:
    from fsspec.implementations.memory import MemoryFileSystem

    class Server(MemoryFileSystem):
        protocol = "sftp"
        storage_options = {"host": "far"}  # noqa: RUF012

    assert place_of(wrapped(Server()), "/home/me/a#1").uri == "sftp:///home/me/a#1"


def test_names_of_runs_stay_what_they_are(tmp_path: Path) -> None:
    system = S3FileSystem(anonymous=True, region="eu-west-1")
    config = StoreConfig.from_env()
    for name in ("exp#1", "a%20b", "a b"):
        storage = place_of(system, f"bucket/{name}").open(config)
        assert storage.uri == f"s3://bucket/{name}"
    with pytest.raises(InvalidInput, match="'s3://bucket/exp' cannot be taken literally"):
        place_of(system, "bucket/exp?1").open(config)
    assert place_of(LocalFileSystem(), f"{tmp_path}/exp?1").open(config).uri == f"{tmp_path}/exp?1"


def test_gcs_without_credentials_is_anonymous() -> None:
    assert place_of(GcsFileSystem(anonymous=True), "bucket/a").storage_options == {"token": "anon"}


@pytest.mark.parametrize(
    ("filesystem", "reason"),
    [
        (wrapped(fsspec.filesystem("memory")), "memory of one process"),
        (S3FileSystem(role_arn="arn:aws:iam::1:role/r", region="eu-west-1"), "assumes a role"),
    ],
)
def test_what_cannot_be_opened_again_is_refused(filesystem: Any, reason: str) -> None:
    with pytest.raises(InvalidInput, match=reason):
        place_of(filesystem, "bucket/a")


def test_ckptstore_reads_what_the_file_system_wrote() -> None:
    with s3_server(buckets=["test"]) as server:
        system = S3FileSystem(
            access_key="test",
            secret_key="testsecret",
            endpoint_override=server.endpoint_url.removeprefix("http://"),
            scheme="http",
            region="us-east-1",
        )
        with system.open_output_stream("test/run/file") as file:
            file.write(b"bytes")
        storage = place_of(system, "test/run").open(StoreConfig.from_env())
        assert storage.read("file") == b"bytes"
        storage.close()
