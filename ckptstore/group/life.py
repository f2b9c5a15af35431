"""Give and judge signs of life, and set the pace of waiting. No clock of another machine is ever compared."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

from ckptstore.errors import CkptstoreError
from ckptstore.runtime.beat import awaited
from ckptstore.runtime.parallel import started

logger = logging.getLogger("ckptstore.group")

Clock = Callable[[], float]


LEFT: Hashable = "left"
"""The last sign of a rank, which has closed its store and will not answer any more."""


def beat_interval_seconds(rank_timeout_seconds: float) -> float:
    """Return the interval between signs of life: ten fit in the time after which a silent rank counts as dead."""
    return min(30.0, rank_timeout_seconds / 10)


def _now() -> float:
    return time.monotonic()


class Beater:
    """The `beat` of one rank. It sends at most one sign per interval, however often and on any thread it is called."""

    def __init__(
        self,
        give_sign: Callable[[], None],
        *,
        interval_seconds: float,
        patience_seconds: float = 0.0,
        clock: Clock = _now,
    ) -> None:
        """`patience_seconds` is the time for which signs go out by themselves in `at_work`."""
        self._give_sign = give_sign
        self._interval_seconds = interval_seconds
        self._patience_seconds = patience_seconds
        self._clock = clock
        self._busy = threading.Lock()
        self._next_at = 0.0
        self._beat_at = clock()
        self.begin()

    def begin(self) -> None:
        """Begin a new meeting. The first sign is due after one interval, so a short meeting needs none."""
        self._next_at = self._clock() + self._interval_seconds

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Send signs by themselves while the context lasts, until no beat has come for `patience_seconds`.

        So one long step (a request that is retried, a listing, a slow disk) is not taken for death, and a hanging
        process falls silent in the end.
        """
        ended = threading.Event()
        self._beat_at = self._clock()
        helper = started(partial(self._help, ended), name="ckptstore-signs")
        try:
            with awaited(self):
                yield
        finally:
            ended.set()
            if helper is not None:
                helper.join()  # no sign comes after the last one of `leave`

    def _help(self, ended: threading.Event) -> None:
        while not ended.wait(self._interval_seconds):
            if self._clock() - self._beat_at < self._patience_seconds:
                self._sign()

    def __call__(self) -> None:
        self._beat_at = self._clock()
        self._sign()

    def _sign(self) -> None:
        if self._clock() < self._next_at or not self._busy.acquire(blocking=False):
            return
        try:
            if self._clock() >= self._next_at:
                self._next_at = self._clock() + self._interval_seconds
                self._give_sign()
        except CkptstoreError as error:  # a failed sign must not fail an upload; the next one may succeed
            logger.warning("a sign of life could not be given: %s", error)
        finally:
            self._busy.release()


class Watch:
    """The awaited ranks from the view of one waiting process, which knows by a change of their signs that they live.

    Silence is added up from look to look, and a long gap between two looks counts as three intervals at most: a process
    that was itself stopped for an hour has seen nothing in that hour, so nobody counts as dead because of it.
    """

    def __init__(self, ranks: Iterable[int], *, timeout_seconds: float, clock: Clock = _now) -> None:
        self._timeout_seconds = timeout_seconds
        self._interval_seconds = beat_interval_seconds(timeout_seconds)
        self._clock = clock
        self._silence_seconds = dict.fromkeys(ranks, 0.0)
        self._signs: dict[int, Hashable] = {}
        self._left: set[int] = set()
        self._looked_at = clock()
        self._look_at = self._looked_at + self._interval_seconds / 4

    @property
    def awaited(self) -> list[int]:
        """The ranks that have not answered yet, in order."""
        return sorted(self._silence_seconds)

    def answered(self, rank: int) -> None:
        """Note that the rank has answered, and watch it no longer."""
        self._silence_seconds.pop(rank, None)
        self._left.discard(rank)

    def due(self) -> bool:
        """Return True if it is time to look at the signs again."""
        return self._clock() >= self._look_at

    def look(self, signs: Mapping[int, Hashable]) -> None:
        """Note the present signs. A rank without a sign is missing in `signs`."""
        now = self._clock()
        gap_seconds = min(now - self._looked_at, 3 * self._interval_seconds)
        self._looked_at, self._look_at = now, now + self._interval_seconds
        for rank in self._silence_seconds:
            sign = signs.get(rank)
            if sign is LEFT:
                self._left.add(rank)
            # The first look only shows the state before: no sign of life
            lives = sign != self._signs.setdefault(rank, sign)
            self._signs[rank] = sign
            self._silence_seconds[rank] = 0.0 if lives else self._silence_seconds[rank] + gap_seconds

    def left(self) -> tuple[int, ...]:
        """Return the awaited ranks that have left, as of the last look."""
        return tuple(sorted(self._left))

    def silent(self) -> tuple[int, ...]:
        """Return the awaited ranks without a sign for the whole timeout, as of the last look."""
        return tuple(rank for rank in self.awaited if self._silence_seconds[rank] >= self._timeout_seconds)


class Pace:
    """The pace of looking: sleep for a tenth of the time waited so far, within bounds.

    So waiting adds a latency of at most a tenth, and the number of requests grows with the logarithm of the time.
    """

    def __init__(self, *, shortest_seconds: float, longest_seconds: float, clock: Clock = _now) -> None:
        self._shortest_seconds = shortest_seconds
        self._longest_seconds = longest_seconds
        self._clock = clock
        self._began_at = self._looked_at = clock()

    def progress(self) -> None:
        """Return to short sleeps, after a message came."""
        self._began_at = self._clock()

    def look(self) -> None:
        """Note that a request begins."""
        self._looked_at = self._clock()

    def seconds(self) -> float:
        """Return the time to sleep now, at least that of the last request, so requests fill at most half the time."""
        now = self._clock()
        asked = max(self._shortest_seconds, (now - self._began_at) / 10, now - self._looked_at)
        return min(asked, self._longest_seconds)
