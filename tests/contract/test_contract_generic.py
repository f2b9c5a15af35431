"""The storage contract on a URL that only fsspec knows."""

from __future__ import annotations

import time
from importlib import import_module
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem

import ckptstore
from ckptstore.errors import InvalidInput
from ckptstore.storage.base import Doubts
from ckptstore.storage.fsspec.generic import GenericStorage
from ckptstore.testing import StorageContract


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

    powers = (Doubts,)

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


def test_a_place_without_create_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with ckptstore.open_store(f"disk://{tmp_path}/run") as store:
        for begin in (lambda: store.save(1, {"a": 1}), lambda: store.resume({"a": 1})):
            with pytest.raises(InvalidInput, match="cannot create a file only where there is none") as error:
                begin()
            assert "single_writer=True" in str(error.value.hint)
    assert list(tmp_path.iterdir()) == []
