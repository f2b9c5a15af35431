"""Memory storage, alone and wrapped, keeps the storage contract."""

from __future__ import annotations

import uuid
from typing import Any

import pytest

from ckptstore.errors import StorageError
from ckptstore.storage.base import CopiesInside, CreatesExclusively, WritesParts
from ckptstore.storage.memory import MemoryStorage
from ckptstore.testing.faults import CountCalls, wrap
from ckptstore.testing.ranks import run_ranks
from ckptstore.testing.storage_contract import StorageContract


class TestMemory(StorageContract):
    powers = frozenset({CreatesExclusively, WritesParts, CopiesInside})
    travels = False

    @pytest.fixture
    def storage(self) -> Any:
        self.name = uuid.uuid4().hex
        return MemoryStorage(f"memory://{self.name}/below/it")

    def raw_write(self, key: str, data: bytes) -> None:
        MemoryStorage(f"memory://{self.name}").write(f"below/it/{key}", [memoryview(data)])

    def raw_read(self, key: str) -> bytes:
        return MemoryStorage(f"memory://{self.name}/below").read(f"it/{key}")

    def test_incomplete_parts_are_no_file(self, storage: MemoryStorage) -> None:
        writer = storage.open_parts("f", (1 << 20) + 5)
        writer.write_part(0, [memoryview(bytes(1 << 20))])
        for offset, size_bytes in ((1 << 20, 4), (1 << 20, 6), (7, 1 << 20)):
            with pytest.raises(StorageError, match="no part"):
                writer.write_part(offset, [memoryview(bytes(size_bytes))])
        with pytest.raises(StorageError, match="lacks the parts at"):
            writer.finish()
        assert list(storage.list("")) == []
        writer.write_part(1 << 20, [memoryview(b"12345")])
        writer.finish()
        with pytest.raises(StorageError, match="already"):
            writer.finish()


@pytest.mark.slow
class TestWrappedMemory(TestMemory):
    """Everything holds with hooks around, but what the wrapper does not have."""

    @pytest.fixture
    def storage(self) -> Any:
        self.name = uuid.uuid4().hex
        return wrap(MemoryStorage(f"memory://{self.name}/below/it"), CountCalls())

    test_the_clock_can_run_ahead = None  # type: ignore[assignment]


def use_after_fork() -> str:
    import os

    storage = MemoryStorage("memory://forked")
    storage.write("a", [])
    reader, writer = os.pipe()
    if os.fork() == 0:
        said = []
        for use in (lambda: storage.read("a"), lambda: storage.list(""), lambda: storage.create("b", b"")):
            try:
                use()
                said.append("worked")
            except StorageError as error:
                said.append(str(error))
        os.write(writer, "\n".join(said).encode())
        os._exit(0)
    os.wait()
    return os.read(reader, 10_000).decode()


def test_a_fork_is_refused() -> None:
    (said,) = run_ranks(1, use_after_fork)
    lines = said.splitlines()
    assert len(lines) == 3
    assert all("spawn" in line for line in lines)
