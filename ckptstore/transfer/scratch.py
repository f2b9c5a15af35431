"""Lend buffers that bytes pass through, under one budget for all operations of a transfer.

Buffers are reused, because memory that is new to the process costs more than the copy into it.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ckptstore.transfer.pool import Operation

_ROUND_BYTES = 64 << 10
_KEPT_BYTES = 64 << 20
"""The bytes that stay ready for the next operation."""
_TICK_SECONDS = 0.1


class Scratch:
    """Lends buffers. Their sum, lent and kept, stays within the budget, except for a single larger one lent alone."""

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._changed = threading.Condition()
        self._kept: list[mmap.mmap] = []
        self._lent_bytes = 0

    @contextmanager
    def take(self, size_bytes: int, run: Operation) -> Iterator[memoryview]:
        """Lend a buffer of at least that size until the context ends; wait until the budget has room for it."""
        if not size_bytes:
            yield memoryview(bytearray())
            return
        buffer = self._lend(-(-size_bytes // _ROUND_BYTES) * _ROUND_BYTES, run)
        try:
            with memoryview(buffer) as view:
                yield view
        finally:
            self._give_back(buffer)

    def trim(self) -> None:
        """Free the kept memory, all but a little for the next operation."""
        with self._changed:
            self._drop_kept(_KEPT_BYTES)

    def close(self) -> None:
        """Free all kept memory."""
        with self._changed:
            self._drop_kept(0)

    def _lend(self, size_bytes: int, run: Operation) -> mmap.mmap:
        with self._changed:
            while self._lent_bytes and self._lent_bytes + size_bytes > self._budget_bytes:
                run.check()
                self._changed.wait(_TICK_SECONDS)
            for index, buffer in enumerate(self._kept):
                if size_bytes <= len(buffer) and self._lent_bytes + len(buffer) <= self._budget_bytes:
                    self._lent_bytes += len(buffer)
                    return self._kept.pop(index)
            self._drop_kept(max(0, self._budget_bytes - self._lent_bytes - size_bytes))
            self._lent_bytes += size_bytes
        try:
            from ckptstore.runtime.new_memory import new_memory

            return new_memory(size_bytes)
        except BaseException:
            with self._changed:
                self._lent_bytes -= size_bytes
            raise

    def _give_back(self, buffer: mmap.mmap) -> None:
        with self._changed:
            self._lent_bytes -= len(buffer)
            self._kept.append(buffer)
            self._drop_kept(max(0, self._budget_bytes - self._lent_bytes))
            self._changed.notify_all()

    def _drop_kept(self, left_bytes: int) -> None:
        """Free kept buffers, the oldest first, until at most so many bytes are left."""
        kept_bytes = sum(map(len, self._kept))
        while kept_bytes > left_bytes:
            kept_bytes -= len(self._kept.pop(0))
