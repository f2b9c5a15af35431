"""The storage contract by the generic engine: s3fs, gcsfs and adlfs themselves, on the servers of the other engines."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from test_contract_azure import AzureContract
from test_contract_gcs import GcsContract
from test_contract_s3 import OnOwnServer, S3Contract

import ckptstore
from ckptstore.errors import InvalidInput, StorageError
from ckptstore.storage.base import CreatesExclusively
from ckptstore.storage.open import open_storage
from ckptstore.testing.s3_server import S3Server

pytestmark = pytest.mark.slow

POWERS = (CreatesExclusively,)


class TestS3fsOnOwnServer(OnOwnServer, S3Contract):
    engine = "fsspec"
    powers = POWERS
    num_deleted_files = 600  # one by one


@pytest.mark.long
class TestAdlfsOnAzurite(AzureContract):
    engine = "fsspec"
    powers = POWERS


@pytest.mark.long
class TestGcsfsOnFakeGcs(GcsContract):
    engine = "fsspec"
    powers = POWERS


def test_a_file_with_the_border_of_gcsfs_is_stored_whole(fake_gcs: Any) -> None:
    data = b"--==0==--\nbehind"
    with closing(
        open_storage("gs://test/border", storage_options=fake_gcs.storage_options, engine="fsspec")
    ) as storage:
        storage.write("file", [memoryview(data)])
        assert storage.read("file") == data
        assert isinstance(storage, CreatesExclusively)
        with pytest.raises(StorageError, match="overwrite"):
            storage.create("new", data)


def test_a_large_file_goes_up_in_parts(fast_s3: S3Server) -> None:
    data = os.urandom(33 << 20)
    with closing(open_storage("s3://test/large", storage_options=fast_s3.storage_options, engine="fsspec")) as storage:
        storage.write("file", [memoryview(data)[: 1 << 20], memoryview(data)[1 << 20 :]])
        view = memoryview(bytearray(len(data)))
        storage.read_into("file", 0, [view])
        assert view == data


def test_a_missing_bucket_is_named_and_not_made(fast_s3: S3Server) -> None:
    with closing(open_storage("s3://nowhere/x", storage_options=fast_s3.storage_options, engine="fsspec")) as storage:
        for call in (lambda: storage.write("k", [memoryview(b"x")]), lambda: storage.stat("k")):
            with pytest.raises(StorageError):
                call()
    import s3fs

    assert not s3fs.S3FileSystem(**fast_s3.storage_options).exists("nowhere")


@pytest.mark.parametrize("server", ["fast_s3", "fake_gcs", "azurite"])
def test_a_store_on_a_file_system_that_is_given(request: pytest.FixtureRequest, server: str, tmp_path: Path) -> None:
    import adlfs
    import gcsfs
    import s3fs

    options = request.getfixturevalue(server).storage_options
    scheme, family = {
        "fast_s3": ("s3", s3fs.S3FileSystem),
        "fake_gcs": ("gs", gcsfs.GCSFileSystem),
        "azurite": ("az", adlfs.AzureBlobFileSystem),
    }[server]
    (tmp_path / "weights").write_bytes(os.urandom(1000))
    uri, fs = f"{scheme}://test/given-{os.getpid()}", family(**options)
    with ckptstore.open_store(uri, fs=fs) as store:
        store.save_directory(1, tmp_path)
    assert fs.exists(f"test/given-{os.getpid()}/store.json")
    with ckptstore.open_store(uri, storage_options=options) as store:  # by another engine
        checkpoint = store.latest()
        assert checkpoint is not None
        assert checkpoint.verify().ok


def test_a_file_system_that_cannot_serve_a_store_is_refused(tmp_path: Path) -> None:
    import fsspec
    import s3fs

    system = s3fs.S3FileSystem(anon=True)
    refusals: list[tuple[str, dict[str, Any], str]] = [
        ("gs://test/x", {"fs": system}, "does not serve"),
        (str(tmp_path), {"fs": system}, "does not serve"),
        ("memory://x", {"fs": fsspec.filesystem("memory")}, "does not serve"),
        ("s3://test/x", {"fs": system, "engine": "native"}, "both given"),
        ("s3://test/x", {"fs": system, "storage_options": {"anon": True}}, "both given"),
        ("s3://test/x", {"fs": "s3"}, "file system of fsspec"),
        ("s3://test/x", {"fs": s3fs.S3FileSystem(anon=True, asynchronous=True)}, "asynchronous"),
        ("simplecache://test/x", {"fs": fsspec.filesystem("simplecache", fs=system)}, "cache in front"),
        ("local://x", {"fs": fsspec.filesystem("file")}, "path of this machine"),
    ]
    for uri, keywords, text in refusals:
        with pytest.raises(InvalidInput, match=text):
            open_storage(uri, **keywords)
