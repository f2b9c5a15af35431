"""The place that a file system of pyarrow stands for is found without asking it for any byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from pyarrow.fs import FSSpecHandler, GcsFileSystem, LocalFileSystem, PyFileSystem, S3FileSystem, SubTreeFileSystem
from storing import arrow_s3

from ckptstore import InvalidInput
from ckptstore.config import StoreConfig
from ckptstore.integrations.ray.filesystem import place_of
from ckptstore.testing.s3_server import S3Server

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


class Server(MemoryFileSystem):
    """One whose paths begin with a slash."""

    protocol = "sftp"


ENDPOINT = {"key": "k", "secret": "s", "endpoint_url": "http://127.0.0.1:9000"}
S3 = S3FileSystem(access_key="k", secret_key="s", endpoint_override="127.0.0.1:9000", scheme="http", region="eu-west-1")
PLACES: list[tuple[Any, str, str, Any]] = [
    (wrapped(DirFileSystem("/mnt/shared", fsspec.filesystem("file"))), "runs/a", "/mnt/shared/runs/a", None),
    (S3, "bucket/a", "s3://bucket/a", {**ENDPOINT, "client_kwargs": {"region_name": "eu-west-1"}}),
    (wrapped(fsspec.filesystem("s3", **ENDPOINT, token=None)), "bucket/a", "s3://bucket/a", ENDPOINT),
    (wrapped(Server()), "/home/me/a#1", "sftp:///home/me/a#1", None),
    (GcsFileSystem(anonymous=True), "bucket/a", "gs://bucket/a", {"token": "anon"}),
]


@pytest.mark.parametrize(("filesystem", "path", "uri", "options"), PLACES)
def test_a_place_has_the_uri_and_the_options_of_the_file_system(
    filesystem: Any, path: str, uri: str, options: Any
) -> None:
    place = place_of(filesystem, path)
    assert (place.uri, place.storage_options) == (uri, options)
    assert "127.0.0.1" not in repr(place), "no option is shown: one may be a secret"
    given = place_of(filesystem, path, storage_options={"profile": "p"})
    assert given.storage_options == (None if uri[0] == "/" else {"profile": "p"})


def test_ckptstore_reads_what_the_file_system_wrote(s3: S3Server) -> None:
    with arrow_s3(s3).open_output_stream("test/run/file") as file:
        file.write(b"bytes")
    storage = place_of(arrow_s3(s3), "test/run").open(StoreConfig.from_env())
    assert storage.read("file") == b"bytes"
    storage.close()


def test_names_of_runs_stay_what_they_are(tmp_path: Path) -> None:
    system = S3FileSystem(anonymous=True, region="eu-west-1")
    config = StoreConfig.from_env()
    for name in ("exp#1", "a%20b", "a b"):
        storage = place_of(system, f"bucket/{name}").open(config)
        assert storage.uri == f"s3://bucket/{name}"
    with pytest.raises(InvalidInput, match="'s3://bucket/exp' cannot be taken literally"):
        place_of(system, "bucket/exp?1").open(config)
    assert place_of(LocalFileSystem(), f"{tmp_path}/exp?1").open(config).uri == f"{tmp_path}/exp?1"


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
