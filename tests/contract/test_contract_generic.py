"""The storage contract on a URL that only fsspec knows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem

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
