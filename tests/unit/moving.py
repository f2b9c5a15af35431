"""What the tests of the transfer engine share: storages of both kinds, data, and a transfer over them."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from ckptstore.config import RetryConfig, TransferConfig
from ckptstore.format.digest import BLOCK_BYTES, Digest
from ckptstore.storage.disk.local import LocalStorage
from ckptstore.storage.memory import MemoryStorage
from ckptstore.transfer import RangeRead, Transfer, Wanted
from ckptstore.transfer.moves import PlannedFile
from ckptstore.transfer.sources import FileSource, MemorySource

MIB = 1 << 20
DATA = random.Random(0).randbytes(40 * MIB + 12_345)
QUICK_RETRY = RetryConfig(retry_wait_initial_seconds=0.001, retry_wait_max_seconds=0.002)

_names = iter(range(1_000_000))
_opened: list[Transfer] = []


@pytest.fixture(autouse=True)
def transfers_end() -> Iterator[None]:
    """Close what the test has opened: then no thread is left."""
    yield
    while _opened:
        _opened.pop().close()
    deadline = time.monotonic() + 30
    while left := [thread for thread in threading.enumerate() if thread.name.startswith("ckptstore-transfer-")]:
        assert time.monotonic() < deadline, f"a closed transfer has threads: {left}"
        time.sleep(0.05)


def make_storage(kind: str, path: Path) -> Any:
    """A storage with nothing in it."""
    return LocalStorage(path / "store") if kind == "local" else MemoryStorage(f"memory://transfer-{next(_names)}")


def transfer_over(storage: Any, *, retry: RetryConfig = QUICK_RETRY, **config: Any) -> Transfer:
    """A transfer with four threads, unless the configuration says otherwise."""
    _opened.append(Transfer(storage, config=TransferConfig(**{"num_threads": 4, **config}), retry=retry))
    return _opened[-1]


def from_memory(key: str, data: bytes, payloads: Sequence[tuple[int, int]] = ()) -> PlannedFile:
    """A file in two buffers and an empty one."""
    view = memoryview(data)
    return PlannedFile(key, MemorySource([view[:7], view[7:7], view[7:]], payloads))


def from_file(key: str, path: Path, data: bytes) -> PlannedFile:
    """A file on disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return PlannedFile(key, FileSource.of(path))


def wanted(key: str, data: bytes) -> Wanted:
    """The file as it should be."""
    return Wanted(key, len(data), Digest.of(data))


def block_digests(data: bytes, payloads: Sequence[tuple[int, int]]) -> tuple[bytes, ...]:
    """The digests of all blocks, computed block by block."""
    view = memoryview(data)
    return tuple(
        b"".join(
            Digest.of(view[at : min(at + BLOCK_BYTES, start + size)]).value.to_bytes(4, "little")
            for at in range(start, start + size, BLOCK_BYTES)
        )
        for start, size in payloads
    )


def checked_range(key: str, data: bytes, offset: int, size_bytes: int, *, num_views: int = 1) -> RangeRead:
    """A read of a stretch into new memory, with a check for each block; the data say what should be there."""
    target = memoryview(bytearray(size_bytes))
    cut = -(-size_bytes // num_views) or 1
    checks = tuple(
        (
            min(BLOCK_BYTES, size_bytes - at),
            Digest.of(memoryview(data)[offset + at : offset + min(at + BLOCK_BYTES, size_bytes)]),
        )
        for at in range(0, size_bytes, BLOCK_BYTES)
    )
    return RangeRead(key, offset, tuple(target[at : at + cut] for at in range(0, size_bytes, cut)), checks)
