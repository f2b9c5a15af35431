"""Signs of life: giving them, judging them, and the pace of waiting. No clock of another machine is ever compared."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager

from ckptstore.errors import CkptstoreError
from ckptstore.runtime.beat import awaited

logger = logging.getLogger("ckptstore.group")

Clock = Callable[[], float]


class Left:
    """The last sign of a rank: it has closed its store and will answer nothing any more."""

    def __repr__(self) -> str:
        return "LEFT"


LEFT = Left()


def beat_interval_seconds(rank_timeout_seconds: float) -> float:
    """How far signs of life are apart: ten of them fit in the time after which a silent rank counts as dead."""
    return min(30.0, rank_timeout_seconds / 10)


def _now() -> float:
    return time.monotonic()


class Beater:
    """The `beat` of one rank: at most one sign per interval goes out, however often and from wherever it is called."""

    def __init__(
        self,
        give_sign: Callable[[], None],
        *,
        interval_seconds: float,
        patience_seconds: float = 0.0,
        clock: Clock = _now,
    ) -> None:
        """`patience_seconds` is for how long signs go out by themselves in `at_work`."""
        self._give_sign = give_sign
        self._interval_seconds = interval_seconds
        self._patience_seconds = patience_seconds
        self._clock = clock
        self._busy = threading.Lock()
        self._next_at = 0.0
        self._beat_at = clock()
        self.begin()

    def begin(self) -> None:
        """A new exchange begins: a short one needs no sign at all."""
        self._next_at = self._clock() + self._interval_seconds

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Inside, signs go out by themselves, until no beat has come for `patience_seconds`.

        So one long step (a request that is retried, a listing, a slow disk) is not taken for death, and whoever hangs
        falls silent in the end.
        """
        ended = threading.Event()
        self._beat_at = self._clock()
        helper = threading.Thread(target=self._help, args=(ended,), name="ckptstore-signs", daemon=True)
        helper.start()
        try:
            with awaited(self):
                yield
        finally:
            ended.set()
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
        except CkptstoreError as error:  # an upload must not fail because a sign did; the next one may get through
            logger.warning("a sign of life could not be given: %s", error)
        finally:
            self._busy.release()


class Watch:
    """Who of the awaited ranks is alive, as one waiting process sees it: by change of their signs.

    Silence is added up from look to look, and a long gap between two looks counts as three intervals at most: a process
    that was stopped itself for an hour has seen nothing in that hour, and condemns nobody for it.
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
        """The rank's answer is there: it need not live any longer."""
        self._silence_seconds.pop(rank, None)
        self._left.discard(rank)

    def due(self) -> bool:
        """Whether it is time to look at the signs again."""
        return self._clock() >= self._look_at

    def look(self, signs: Mapping[int, Hashable]) -> None:
        """Take note of the present signs. A rank that has none yet is left out of `signs`."""
        now = self._clock()
        gap_seconds = min(now - self._looked_at, 3 * self._interval_seconds)
        self._looked_at, self._look_at = now, now + self._interval_seconds
        for rank in self._silence_seconds:
            sign = signs.get(rank)
            if sign is LEFT:
                self._left.add(rank)
            # the first look shows how things stood, not that somebody lives
            lives = sign != self._signs.setdefault(rank, sign)
            self._signs[rank] = sign
            self._silence_seconds[rank] = 0.0 if lives else self._silence_seconds[rank] + gap_seconds

    def left(self) -> tuple[int, ...]:
        """The awaited ranks that have left, as of the last look."""
        return tuple(sorted(self._left))

    def silent(self) -> tuple[int, ...]:
        """The awaited ranks that had given no sign for the whole timeout, as of the last look."""
        return tuple(rank for rank in self.awaited if self._silence_seconds[rank] >= self._timeout_seconds)


class Pace:
    """How long to sleep between two looks: a tenth of the time waited so far, within bounds.

    So waiting costs a latency of at most a tenth, and a number of requests that grows with the logarithm of the time.
    """

    def __init__(self, *, shortest_seconds: float, longest_seconds: float, clock: Clock = _now) -> None:
        self._shortest_seconds = shortest_seconds
        self._longest_seconds = longest_seconds
        self._clock = clock
        self._began_at = self._looked_at = clock()

    def progress(self) -> None:
        """Something came: look closely again."""
        self._began_at = self._clock()

    def look(self) -> None:
        """A request begins."""
        self._looked_at = self._clock()

    def seconds(self) -> float:
        """How long to sleep now; at least as long as the last request took, so that requests fill half the time."""
        now = self._clock()
        asked = max(self._shortest_seconds, (now - self._began_at) / 10, now - self._looked_at)
        return min(asked, self._longest_seconds)
