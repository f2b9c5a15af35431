"""Copies inside one provider: the storage moves the bytes, they are read back, and damage at the source is told."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import ckptstore
from ckptstore.errors import CheckpointDamaged
from ckptstore.extensions.exchange.copying import CopyReport, copy_checkpoint, copy_store
from ckptstore.storage.base import CopiesFrom
from ckptstore.storage.open import open_storage
from ckptstore.testing.s3_server import S3Server, s3_server
from ckptstore.tools.cli import main
from ckptstore.transfer.opened import open_place

pytestmark = pytest.mark.slow

MIB = 1 << 20
Options = dict[str, Any] | None
SIZES = {"a.bin": 20 * MIB + 3, "b.bin": 2 * MIB, "c.bin": 100, "empty.bin": 0}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("files")
    for name, size_bytes in SIZES.items():
        (path / name).write_bytes(os.urandom(size_bytes))
    return path


def copy_all(uri: str, target: str, options: Options, target_options: Options) -> CopyReport:
    opened = closing(open_place(target, storage_options=target_options))
    with ckptstore.open_store(uri, storage_options=options) as store, opened as place:
        return copy_store(store, place)


def check(uri: str, options: dict[str, Any] | None, directory: Path, into: Path) -> None:
    with ckptstore.open_store(uri, storage_options=options) as store:
        checkpoint = store.latest()
        assert checkpoint is not None
        checkpoint.verify().raise_if_damaged()
        path = checkpoint.to_directory(into)
    for name in SIZES:
        assert (path / name).read_bytes() == (directory / name).read_bytes()


def test_no_payload_goes_up_from_here(fast_s3: S3Server, directory: Path, tmp_path: Path) -> None:
    options, uri = fast_s3.storage_options, "s3://test/inside/one"
    with ckptstore.open_store(uri, storage_options=options) as store:
        store.save_directory(1, directory)
    seen = len(fast_s3.log)
    report = copy_all(uri, f"{uri}-copy", options, options)
    log = fast_s3.log[seen:]
    assert report.num_copied == len(SIZES)
    assert sum(request.operation == "CopyObject" for request in log) == len(SIZES)
    assert not [request for request in log if request.operation in ("CreateMultipartUpload", "UploadPart")]
    sent = [request for request in log if request.operation == "PutObject" and "checkpoints/" in request.path]
    assert [request.path.rpartition("/")[2] for request in sent] == ["ckptstore.json"]
    check(f"{uri}-copy", options, directory, tmp_path / "mine")
    again = copy_all(uri, f"{uri}-copy", options, options)
    assert (again.steps, again.present, again.num_copied) == ((), (1,), 0)


def test_options_are_for_the_places_in_buckets(fast_s3: S3Server, directory: Path, tmp_path: Path) -> None:
    """From a bucket to a disk, back to the bucket, and both compared."""
    uri, path = "s3://test/by/command", tmp_path / "copy"
    with ckptstore.open_store(uri, storage_options=fast_s3.storage_options) as store:
        store.save_directory(1, directory)
    flags = [f"--storage-option={name}={fast_s3.storage_options[name]}" for name in ("key", "secret", "endpoint_url")]
    for words in (["cp", uri, str(path)], ["cp", str(path), f"{uri}-back"], ["diff", f"{path}@1", f"{uri}-back@1"]):
        done = CliRunner().invoke(main, [*words, *flags])
        assert done.exit_code == 0, done.output
    for words in (["cp", str(path), str(tmp_path / "other")], ["diff", f"{path}@1", f"{path}@1"]):
        done = CliRunner().invoke(main, [*words, *flags])
        assert done.exit_code == ckptstore.InvalidInput.exit_code
        assert "--storage-option means nothing for" in done.output


def test_other_credentials_are_another_place(fast_s3: S3Server, directory: Path, tmp_path: Path) -> None:
    options, uri = fast_s3.storage_options, "s3://test/streamed"
    with ckptstore.open_store(uri, storage_options=options) as store:
        store.save_directory(1, directory)
    with s3_server(buckets=["test"]) as other:
        copy_all(uri, "s3://test/streamed", options, other.storage_options)
        assert "CopyObject" not in other.operations()
        check("s3://test/streamed", other.storage_options, directory, tmp_path / "mine")


def test_damage_at_the_source_is_told(fast_s3: S3Server, directory: Path) -> None:
    options, uri = fast_s3.storage_options, "s3://test/damaged"
    with ckptstore.open_store(uri, storage_options=options) as store:
        checkpoint = store.save_directory(1, directory)
        storage = open_storage(checkpoint.uri, storage_options=options)
        storage.write("b.bin", [memoryview(os.urandom(SIZES["b.bin"]))])
        with closing(open_place(f"{uri}-copy", storage_options=options)) as target:
            with pytest.raises(CheckpointDamaged, match="damaged at the source"):
                copy_checkpoint(checkpoint, target)
            assert not {"b.bin", "ckptstore.json"} & {file.key for file in target.storage.list("")}
        storage.close()


@pytest.mark.parametrize(("name", "scheme"), [("fake_gcs", "gs"), ("azurite", "az")])
def test_other_clouds(request: pytest.FixtureRequest, name: str, scheme: str) -> None:
    options = request.getfixturevalue(name).storage_options
    source, target = (open_storage(f"{scheme}://test/inside-one/{end}", storage_options=options) for end in "ab")
    source.write("x/y", [memoryview(b"data")])
    assert isinstance(target, CopiesFrom)
    assert target.copy_from(source, "x/y", "z")
    assert target.read("z") == b"data"
    source.close()
    target.close()
