"""The storage, threads, buffers and limits that all operations of a transfer share."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from ckptstore.config import RetryConfig, TransferConfig
from ckptstore.errors import AccessDenied, StorageError, StorageFull
from ckptstore.storage.base import Disk, Doubts, Storage, WritesParts
from ckptstore.storage.retry import retrying
from ckptstore.storage.second_look import looked_twice
from ckptstore.transfer.moves import PlannedFile
from ckptstore.transfer.pool import Operation, Pool
from ckptstore.transfer.scratch import Scratch

if TYPE_CHECKING:
    from ckptstore.transfer.flow import Flow

T = TypeVar("T")

STEP_BYTES = 1 << 20
"""The bytes hashed at once: few enough to be still in the processor's cache when they are used next."""
TASK_BYTES = 16 << 20
"""The bytes that one task of a thread moves."""
_REQUEST_BYTES = 16 << 20
"""The largest single read from a storage on a network."""
_MAX_BATCH_FILES = 64


@dataclass(frozen=True, slots=True)
class Engine:
    """A storage, and the means to move bytes."""

    storage: Storage
    config: TransferConfig
    retry: RetryConfig
    rank: int
    pool: Pool
    scratch: Scratch
    disk: Disk | None = field(init=False)
    """The storage, where it is a disk: a request costs microseconds there, not a round trip."""
    parts: WritesParts | None = field(init=False)
    """The storage, where it writes parts."""
    doubts: Doubts | None = field(init=False)
    """The storage, where it can be read in another way."""
    reading: threading.Semaphore = field(init=False)
    """Held while the bytes of a part are read and hashed, which keeps a processor or a disk busy. A thread that waits
    for it holds no buffer, so there are as many buffers as requests that wait for a server, not as many as threads."""
    flow: Flow | None = field(init=False)
    """The limit of requests in flight; None on a disk, which throttles nobody."""

    def __post_init__(self) -> None:  # once: `isinstance` with a protocol takes microseconds
        object.__setattr__(self, "disk", self.storage if isinstance(self.storage, Disk) else None)
        object.__setattr__(self, "parts", self.storage if isinstance(self.storage, WritesParts) else None)
        object.__setattr__(self, "doubts", self.storage if isinstance(self.storage, Doubts) else None)
        object.__setattr__(self, "reading", threading.Semaphore(self.config.num_threads))
        flow = None
        if not self.disk:
            from ckptstore.transfer.flow import Flow

            flow = Flow(self.pool.num_threads)
        object.__setattr__(self, "flow", flow)

    @property
    def request_bytes(self) -> int:
        """The most bytes of one read."""
        return TASK_BYTES if self.disk else _REQUEST_BYTES

    def algorithm(self, file: PlannedFile) -> str:
        """Return the algorithm of the digests of a file to be written."""
        return file.algorithm or self.config.digest

    def part_bytes(self, size_bytes: int) -> int | None:
        """Return the part size of a file of that size; None where it is written in one call."""
        if self.parts is None:
            return None
        part_bytes = self.parts.part_bytes(size_bytes)
        return part_bytes if size_bytes > part_bytes else None

    def request(self, run: Operation, what: str, call: Callable[[], T]) -> T:
        """Call with retries, unless the operation has failed meanwhile; fewer at once while the storage throttles."""

        def checked() -> T:
            run.check()
            if self.flow is None:
                return call()
            with self.flow.request(run.check):
                return call()

        return retrying(self.retry, what, checked)

    def read(self, run: Operation, key: str, call: Callable[[], T]) -> T:
        """Call as `request` does, for a read of a file; a file that seems damaged or missing is read again, in another
        way."""
        return self.request(run, f"read {key}", partial(looked_twice, self.storage, key, call))

    def small_tasks(self) -> int:
        """Return the number of tasks for small files: no more than are of use on a disk, else without a limit."""
        if self.disk is None or (useful := self.disk.useful_threads()) >= self.pool.num_threads:
            return sys.maxsize
        return useful

    def batches(self, sizes_bytes: list[int]) -> list[slice]:
        """Deal small files, by their sizes, to tasks, so that the bytes of one task stay in the processor's cache."""
        most = max(1, min(_MAX_BATCH_FILES, len(sizes_bytes) // (4 * self.pool.num_threads)))
        found, start, total = [], 0, 0
        for index, size_bytes in enumerate(sizes_bytes):
            if index > start and (index - start >= most or total + size_bytes > STEP_BYTES):
                found.append(slice(start, index))
                start, total = index, 0
            total += size_bytes
        return [*found, slice(start, len(sizes_bytes))] if sizes_bytes else []


def is_worth_writing_anew(error: BaseException) -> bool:
    """Return True if a file that could not be finished may succeed when it is written from the beginning."""
    return isinstance(error, StorageError) and not isinstance(error, StorageFull | AccessDenied)
