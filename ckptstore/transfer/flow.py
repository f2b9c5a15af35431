"""Limit the requests of a transfer in flight: half as many when the storage throttles, then more again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ckptstore.errors import StorageThrottled
from ckptstore.events import ConcurrencyChanged, emit

_TICK_SECONDS = 0.2
"""The interval at which a waiting request looks whether its operation still goes on."""
_RUN = 4
"""The least successes in a row after which one more request is let in."""


class Flow:
    """The requests of one transfer. Safe for threads."""

    def __init__(self, most: int) -> None:
        """Let `most` requests run at once, until the storage throttles."""
        self.limit = most
        self._most = most
        self._changed = threading.Condition()
        self._in_flight = 0
        self._successes = 0
        self._num_cuts = 0

    @contextmanager
    def request(self, check: Callable[[], None]) -> Iterator[None]:
        """Make one request in this context. Waits for its turn; an error that `check` raises meanwhile ends the wait.

        Requests that were in flight when the limit was halved do not halve it again: they report the same throttling.
        """
        num_cuts = self._begin(check)
        try:
            yield
        except BaseException as error:
            self._end(num_cuts, error)
            raise
        self._end(num_cuts, None)

    def _begin(self, check: Callable[[], None]) -> int:
        with self._changed:
            while self._in_flight >= self.limit:
                self._changed.wait(_TICK_SECONDS)
                check()
            self._in_flight += 1
            return self._num_cuts

    def _end(self, num_cuts: int, error: BaseException | None) -> None:
        reason = ""
        with self._changed:
            self._in_flight -= 1
            before = self.limit
            if isinstance(error, StorageThrottled):
                self._successes = 0
                if num_cuts == self._num_cuts:
                    self._num_cuts += 1
                    self.limit = max(1, before // 2)
                    reason = "the storage throttles"
            elif error is None and before < self._most:
                self._successes += 1
                if self._successes >= max(_RUN, before):
                    self._successes, self.limit = 0, before + 1
                    reason = "requests go through again"
            limit = self.limit
            self._changed.notify(1 + max(0, limit - before))
        if limit != before:
            emit(ConcurrencyChanged(limit=limit, reason=reason))
