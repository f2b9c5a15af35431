"""Local storage, alone and wrapped, durable or not, keeps the storage contract."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ckptstore.storage.base import (
    CopiesFrom,
    CopiesInside,
    CreatesExclusively,
    Disk,
    WritesParts,
)
from ckptstore.storage.disk.local import LocalStorage
from ckptstore.testing.faults import CountCalls, wrap
from ckptstore.testing.storage_contract import StorageContract


class TestLocal(StorageContract):
    powers = frozenset({CreatesExclusively, WritesParts, Disk, CopiesFrom, CopiesInside})
    durable = True

    @pytest.fixture
    def storage(self, tmp_path: Path) -> Any:
        self.root = tmp_path / "root é+%"
        return LocalStorage(self.root, durable=self.durable)

    def raw_write(self, key: str, data: bytes) -> None:
        path = self.root / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def raw_read(self, key: str) -> bytes:
        return (self.root / key).read_bytes()


@pytest.mark.slow
class TestWrappedLocal(TestLocal):
    """A wrapped storage has the powers of the one inside, so that code takes the same paths."""

    durable = False

    @pytest.fixture
    def storage(self, tmp_path: Path) -> Any:
        self.root = tmp_path / "root"
        return wrap(LocalStorage(self.root, durable=self.durable), CountCalls())

    def test_what_is_missing_cannot_be_made_durable(self, storage: Any) -> None:
        storage.persist(["missing"])  # nothing is made durable here
