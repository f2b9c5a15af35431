"""Slow sources down to a limit of bytes per second, for bytes that move behind other work."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from ckptstore.runtime.beat import Beat
from ckptstore.transfer.sources import Read, Source

_LONGEST_SLEEP_SECONDS = 0.5


class Pacer:
    """Limits the bytes per second of all threads of a process together.

    A thread waits before it reads, and unused time is not saved up: from the first call on, no more than
    `bytes_per_second` times the elapsed seconds have been read at any moment.
    """

    def __init__(self, bytes_per_second: float) -> None:
        self._bytes_per_second = bytes_per_second
        self._lock = threading.Lock()
        self._free_at = 0.0

    def wait(self, size_bytes: int, waiting: Beat) -> None:
        """Wait until so many bytes may be read. `waiting` is called now and then; its errors pass through."""
        with self._lock:
            self._free_at = until = max(self._free_at, time.monotonic()) + size_bytes / self._bytes_per_second
        while (left_seconds := until - time.monotonic()) > 0:
            waiting()
            time.sleep(min(left_seconds, _LONGEST_SLEEP_SECONDS))


@dataclass(frozen=True, slots=True)
class PacedSource:
    """A `Source` that a pacer slows down."""

    source: Source
    wait: Callable[[int], None]
    """Waits until so many bytes may be read."""

    @property
    def size_bytes(self) -> int:
        return self.source.size_bytes

    @property
    def payloads(self) -> Sequence[tuple[int, int]]:
        return self.source.payloads

    @property
    def in_memory(self) -> bool:
        return self.source.in_memory

    @contextmanager
    def open(self) -> Iterator[Read]:
        with self.source.open() as read:

            def paced(offset: int, size_bytes: int, scratch: memoryview) -> Sequence[memoryview]:
                self.wait(size_bytes)
                return read(offset, size_bytes, scratch)

            yield paced
