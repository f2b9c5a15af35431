"""The storage, the threads, and the limits on buffers and requests that all operations of a transfer share."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Protocol, TypeVar

from ckptstore.config import RetryConfig, TransferConfig
from ckptstore.errors import StorageThrottled
from ckptstore.events import ConcurrencyChanged, emit
from ckptstore.storage.base import Disk, Storage, WritesParts
from ckptstore.storage.probe import is_server
from ckptstore.storage.retry import retrying, without_retries
from ckptstore.storage.second_look import looked_twice
from ckptstore.transfer.moves import FinishedCopy, Supplied
from ckptstore.transfer.pool import Operation, Pool

T = TypeVar("T")

STEP_BYTES = 1 << 20
"""The bytes hashed at once: few enough to be still in the processor's cache when they are used next."""
TASK_BYTES = 16 << 20
"""The bytes that one task of a thread moves, and the most of one read."""
_MAX_BATCH_FILES = 64
_ROUND_BYTES = 64 << 10
_KEPT_BYTES = 64 << 20
"""The bytes of buffers that stay ready for the next operation."""
_TICK_SECONDS = 0.1
"""The interval at which a waiting task looks whether its operation still goes on."""
_RUN = 4
"""The least successes in a row after which one more request is let in."""


class Peers(Protocol):
    """Nodes that read the same, and give each other what one of them has read: see `extensions.peers`."""

    @property
    def are_several(self) -> bool:
        """True if there are nodes to share extents with."""

    def order(self, stretches: Sequence[tuple[str, int, int]]) -> list[int]:
        """Return the numbers of stretches (key, offset, size) in the order in which this node best reads them."""

    def fill(
        self,
        key: str,
        offset: int,
        views: Sequence[memoryview],
        check: Callable[[], None],
        *,
        without: Collection[str] = (),
    ) -> Supplied | None:
        """Fill the views with a stretch of one extent. Return None if the storage has to be read."""

    def mistrust(self, key: str, wrong: Supplied) -> None:
        """Ask the node that supplied this no more for a while: it is not what the storage has."""

    def offer(self, copy_key: str, names: Iterable[tuple[str, str]], finished: FinishedCopy) -> None:
        """Serve files from a finished copy on this node."""

    def close(self) -> None:
        """Close the connections."""


class Engine:
    """A storage, and the means to move bytes."""

    def __init__(
        self, storage: Storage, config: TransferConfig, retry: RetryConfig, rank: int, peers: Peers | None = None
    ) -> None:
        """Start no thread yet. `rank` is that in events, `peers` are nodes to read from before the storage."""
        self.peers = peers
        # A disk without the retries of its wrapper: those here are around them, and a call costs microseconds.
        self.storage = storage = without_retries(storage) if isinstance(storage, Disk) else storage
        self.config = config
        self.retry = retry
        self.rank = rank
        # Once: `isinstance` with a protocol takes microseconds.
        self.disk = storage if isinstance(storage, Disk) else None
        """The storage, where it is a disk: a request costs microseconds there, not a round trip."""
        self.parts = storage if isinstance(storage, WritesParts) else None
        """The storage, where it writes parts."""
        self.pool = Pool(config.num_requests if is_server(storage) else config.num_threads)
        self.scratch = Scratch(config.memory_budget_bytes)
        self.reading = threading.Semaphore(config.num_threads)
        """Held while the bytes of a part are read and hashed, which keeps a processor or a disk busy. A thread that
        waits for it holds no buffer, so there are as many buffers as requests that wait for a server, not as many as
        threads."""
        self.flow = None if self.disk else Flow(self.pool.num_threads)
        """The limit of requests in flight; None on a disk, which throttles nobody."""

    def request(self, run: Operation, what: str, call: Callable[[], T], *, reads: str | None = None) -> T:
        """Call with retries, unless the operation has failed meanwhile; fewer at once while the storage throttles. If
        the call reads the file `reads`, one that seems damaged or missing is read again, in another way."""
        if reads is not None:
            call = partial(looked_twice, self.storage, reads, call)
        if self.flow is not None:
            call = partial(self.flow.request, run.check, call)
        return retrying(self.retry, what, call, check=run.check)

    def batches(self, sizes_bytes: list[int]) -> list[slice]:
        """Deal small files, by their sizes, to tasks, so that the bytes of one task stay in the processor's cache."""
        # Four batches a thread at least: with fewer, the last one keeps one thread busy while the others wait.
        most = max(1, min(_MAX_BATCH_FILES, len(sizes_bytes) // (4 * self.pool.num_threads)))
        found, start, total = [], 0, 0
        for index, size_bytes in enumerate(sizes_bytes):
            if index > start and (index - start >= most or total + size_bytes > STEP_BYTES):
                found.append(slice(start, index))
                start, total = index, 0
            total += size_bytes
        return [*found, slice(start, len(sizes_bytes))] if sizes_bytes else []


class Flow:
    """Limits the requests in flight: half as many when the storage throttles, then more again. Safe for threads."""

    def __init__(self, most: int) -> None:
        """Let `most` requests run at once, until the storage throttles."""
        self.limit = most
        self._most = most
        self._changed = threading.Condition()
        self._in_flight = 0
        self._successes = 0
        self._num_cuts = 0

    def request(self, check: Callable[[], None], call: Callable[[], T]) -> T:
        """Make one request. Waits for its turn; an error that `check` raises meanwhile ends the wait.

        Requests that were in flight when the limit was halved do not halve it again: they report the same throttling.
        """
        with self._changed:
            while self._in_flight >= self.limit:
                self._changed.wait(_TICK_SECONDS)
                check()
            self._in_flight += 1
            num_cuts = self._num_cuts
        try:
            result = call()
        except BaseException as error:
            self._end(num_cuts, error)
            raise
        self._end(num_cuts, None)
        return result

    def _end(self, num_cuts: int, error: BaseException | None) -> None:
        reason = ""
        with self._changed:
            self._in_flight -= 1
            before = self.limit
            if isinstance(error, StorageThrottled):
                self._successes = 0
                # All requests in flight are refused by one wave of throttling: it halves the limit once.
                if num_cuts == self._num_cuts:
                    self._num_cuts += 1
                    self.limit = max(1, before // 2)
                    reason = "the storage throttles"
            elif error is None and before < self._most:
                self._successes += 1
                # As many successes as requests run at once are one round: one more a round, as TCP does it.
                if self._successes >= max(_RUN, before):
                    self._successes, self.limit = 0, before + 1
                    reason = "requests go through again"
            limit = self.limit
            # One for the place that this request leaves, and one for each that was added.
            self._changed.notify(1 + max(0, limit - before))
        if limit != before:
            emit(ConcurrencyChanged(limit=limit, reason=reason))


class Scratch:
    """Lends buffers that bytes pass through. Their sum, lent and kept, stays within the budget, except for a single
    larger one lent alone."""

    # They are kept and reused, because memory that is new to the process costs more than the copy into it.

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
            with self._changed:
                self._lent_bytes -= len(buffer)
                self._kept.append(buffer)
                self._drop_kept(max(0, self._budget_bytes - self._lent_bytes))
                self._changed.notify_all()

    def trim(self, left_bytes: int = _KEPT_BYTES) -> None:
        """Free the kept memory, all but a little for the next operation."""
        with self._changed:
            self._drop_kept(left_bytes)

    def _lend(self, size_bytes: int, run: Operation) -> mmap.mmap:
        with self._changed:
            # Alone, a buffer above the budget is lent all the same: nobody else would ever make room for it.
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

    def _drop_kept(self, left_bytes: int) -> None:
        """Free kept buffers, the oldest first, until at most so many bytes are left."""
        kept_bytes = sum(map(len, self._kept))
        while kept_bytes > left_bytes:
            kept_bytes -= len(self._kept.pop(0))
