"""The storage contract on a URL that only fsspec knows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ckptstore.storage.open import open_storage
from ckptstore.testing import StorageContract


class TestGeneric(StorageContract):
    """fsspec's own file system of this machine stands for all others: it makes directories, and is no object store."""

    @pytest.fixture
    def storage(self, tmp_path: Path) -> Any:
        self.root = tmp_path / "root"
        return open_storage(f"local://{self.root}")

    def raw_write(self, key: str, data: bytes) -> None:
        path = self.root / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def raw_read(self, key: str) -> bytes:
        return (self.root / key).read_bytes()
