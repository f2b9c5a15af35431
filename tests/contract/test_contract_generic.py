"""The storage contract on a URL that only fsspec knows."""

from __future__ import annotations

import os
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem

import ckptstore
from ckptstore.errors import AccessDenied, InvalidInput, StorageUnavailable
from ckptstore.storage.fsspec.generic import GenericStorage
from ckptstore.testing import StorageContract

pytestmark = pytest.mark.slow


class Disk(LocalFileSystem):
    """Under a scheme of its own: that of fsspec is another name for paths, and refused."""

    protocol = "disk"

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return super()._strip_protocol(path.removeprefix("disk://"))


fsspec.register_implementation("disk", Disk, clobber=True)


class DiskStorage(GenericStorage):
    """Brings this module, which knows the scheme, to another process."""


class TestGeneric(StorageContract):
    """fsspec's own file system of this machine stands for all others: it makes directories, and is no object store."""

    powers = ()

    @pytest.fixture
    def storage(self, tmp_path: Path) -> Any:
        self.root = tmp_path / "root"
        return DiskStorage(f"disk://{self.root}", {})

    def raw_write(self, key: str, data: bytes) -> None:
        path = self.root / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def raw_read(self, key: str) -> bytes:
        return (self.root / key).read_bytes()


class Picky(Disk):
    """Accepts only its own option, as the file systems that pass all of them to a client; has an error of its own for a
    directory that is not there; and mixes up threads."""

    protocol = "sftp"

    def __init__(self, username: str = "") -> None:
        super().__init__(use_listings_cache=True)
        self.inside = 0

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return LocalFileSystem._strip_protocol(path.removeprefix("sftp:/"))

    def open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        self.inside += 1
        assert self.inside == 1, "two requests at once"
        time.sleep(0.02)
        try:
            return super().open(path, mode, **options)
        except FileNotFoundError:
            if mode == "rb":
                raise
            raise RuntimeError("550 no such directory") from None
        finally:
            self.inside -= 1


def test_a_store_on_a_file_system_with_one_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(import_module("fsspec.registry")._registry, "sftp", Picky)
    uri = f"sftp:/{tmp_path}/run"
    options = {"username": "me"}
    with ckptstore.open_store(uri, storage_options=options, single_writer=True) as store:
        for step in range(3):
            store.save(step, {f"tensor{number}": torch.arange(9.0) for number in range(9)})
        assert [checkpoint.verify().ok for checkpoint in store] == [True] * 3
    with pytest.raises(InvalidInput, match="storage_options of sftp:// cannot be used"):
        ckptstore.open_store(uri, storage_options={"user": "me"})


class Shaky(Disk):
    """Its connection breaks when a directory is listed."""

    protocol = "shaky"
    match = ""
    trouble: OSError | None = None

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return super()._strip_protocol(path.removeprefix("shaky://"))

    def ls(self, path: str, detail: bool = False, **options: Any) -> Any:
        if Shaky.trouble is not None and Shaky.match in path:
            raise Shaky.trouble
        return super().ls(path, detail=detail, **options)


@pytest.mark.parametrize(
    ("trouble", "expected"),
    [(ConnectionResetError(104, "reset"), StorageUnavailable), (PermissionError(13, "denied"), AccessDenied)],
)
@pytest.mark.parametrize("is_wrapped", [False, True])
def test_a_listing_that_breaks_off_is_not_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_wrapped: bool, trouble: OSError, expected: type[Exception]
) -> None:
    monkeypatch.setitem(import_module("fsspec.registry")._registry, "shaky", Shaky)
    monkeypatch.setenv("CKPTSTORE_RETRY_ATTEMPTS", "1")
    uri, options = f"shaky://{tmp_path}/run", {}
    if is_wrapped:
        uri, options = "dir://run", {"path": str(tmp_path), "target_protocol": "shaky"}
    with ckptstore.open_store(uri, storage_options=options, single_writer=True, group="solo") as store:
        for step in (1, 2):
            store.save(step, {"a": step})
        monkeypatch.setattr(Shaky, "match", "step-0000000002")
        monkeypatch.setattr(Shaky, "trouble", trouble)
        with pytest.raises(expected):
            store.resume()
        monkeypatch.undo()
        assert store.resume().step == 2


def test_a_directory_that_is_removed_while_it_is_listed_is_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = DiskStorage(f"disk://{tmp_path}/run", {})
    for key in ("stays/a", "goes/a"):
        storage.write(key, [memoryview(b"x")])
    list_one = Disk.ls

    def ls(self: Disk, path: str, **options: Any) -> Any:
        if path.endswith("/goes"):
            storage.delete(["goes/a"])
            os.rmdir(path)
        return list_one(self, path, **options)

    monkeypatch.setattr(Disk, "ls", ls)
    assert [file.key for file in storage.list("")] == ["stays/a"]
    assert list(storage.list("nowhere/")) == []


def test_a_place_without_create_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with ckptstore.open_store(f"disk://{tmp_path}/run") as store:
        for begin in (lambda: store.save(1, {"a": 1}), lambda: store.resume({"a": 1})):
            with pytest.raises(InvalidInput, match="cannot create a file only where there is none") as error:
                begin()
            assert "single_writer=True" in str(error.value.hint)
    assert list(tmp_path.iterdir()) == []
