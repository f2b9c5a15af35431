"""What a save takes on each rank, phase by phase, and what the leader makes of it for the manifest.

    agree    from the call until the rank has heard the agreement; a save before, still in flight, is waited for in it
    stage    asynchronous saves: until the copy is made
    upload   until the rank has stored its files
    wait     until all ranks have
    commit   on the leader, until it writes the manifest

Each rank measures from the moment at which it hears the agreement, by a clock of its own. The last one to store its
files says how long all the others wait, so clocks of different nodes are never compared.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from ckptstore.events import SaveEnded, SavePhase, emit, is_heard
from ckptstore.format.timings import RankTimings, Timings, clean_node
from ckptstore.runtime.tracing import Traced
from ckptstore.storage.traffic import Traffic, counting

_DIGITS = 6
"""Of seconds: more of them say nothing."""


class SaveClock:
    """The phases of one save on one rank, one right after the other. An event says when one has ended."""

    def __init__(self) -> None:
        """The save is called now."""
        self._called = self._mark = time.monotonic()
        self._rank = 0
        self._step = 0
        self._attempt: str | None = None
        self._released_seconds: float | None = None
        self._seconds: dict[str, float] = {}
        self._traffic = Traffic()

    @property
    def elapsed_seconds(self) -> float:
        """Since the call."""
        return time.monotonic() - self._called

    def asked(self, *, step: int, rank: int) -> None:
        """Whose save it is, before anything is agreed on."""
        self._step, self._rank = step, rank

    def agreed(self, attempt: str, *, step: int, rank: int) -> None:
        """This rank has heard which attempt it is."""
        self._attempt, self._step, self._rank = attempt, step, rank
        self.ended("agree")

    def traced(self, attempt: str) -> Traced:
        """The save as a tracer sees it. Its attempt has a name from here on."""
        self._attempt = attempt
        return Traced("save", attempt, self._rank, self._step, time.time() - self.elapsed_seconds)

    def ended(self, phase: str, seconds: float | None = None) -> None:
        """A phase has ended that began where the one before did: now, or after so many seconds."""
        began, self._mark = self._mark, time.monotonic() if seconds is None else self._mark + seconds
        self._seconds[phase] = self._mark - began
        if self._attempt is not None and is_heard(SavePhase):
            emit(
                SavePhase(
                    step=self._step,
                    attempt=self._attempt,
                    rank=self._rank,
                    phase=phase,
                    started_at=time.time() - (time.monotonic() - began),
                    seconds=self._seconds[phase],
                )
            )

    def released(self) -> float:
        """The call returns, and training goes on: the seconds that it was held up."""
        self._released_seconds = self.elapsed_seconds
        return self._released_seconds

    def report(self, traffic: Traffic, *, node: str) -> dict[str, Any]:
        """What the leader has to know of this rank, which has stored its files. As JSON."""
        return {
            "rank": self._rank,
            "node": clean_node(node),
            "seconds": {phase: round(seconds, _DIGITS) for phase, seconds in self._seconds.items()},
            "size_bytes": traffic.written_bytes,
            "requests": traffic.requests,
            "retries": traffic.retries,
            "stalled_seconds": round(self._released_seconds or 0.0, _DIGITS),
            "stalls": self._released_seconds is None,
        }

    def met(self, longest_seconds: float | None) -> None:
        """This rank has heard the outcome: the rest was for waiting, as far as one rank took so long, and the commit.

        None says that it has not heard how long any rank took.
        """
        if longest_seconds is None:
            self.ended("wait")
        else:
            self.ended("wait", max(0.0, longest_seconds - _stored_seconds(self._seconds)))
            self.ended("commit")

    @contextmanager
    def part(self, store: str, *, is_last: bool, is_fast: bool = False) -> Iterator[None]:
        """A part of the save, to the store of that URI or with `is_fast` to nodes, is done in this context. An error
        ends the save, and so does its last part."""
        try:
            with counting() as traffic:
                try:
                    yield
                finally:
                    self._traffic.add(traffic)
        except BaseException as error:
            self._over(error, store, is_fast=is_fast)
            raise
        if is_last:
            self._over(None, store, is_fast=is_fast)

    def _over(self, error: BaseException | None, store: str, *, is_fast: bool) -> None:
        if is_heard(SaveEnded):
            seconds, released = self.elapsed_seconds, self._released_seconds
            emit(
                SaveEnded(
                    step=self._step,
                    attempt=self._attempt or "",
                    rank=self._rank,
                    store=store,
                    started_at=time.time() - seconds,
                    seconds=seconds,
                    stalled_seconds=seconds if released is None else released,
                    in_background=released is not None,
                    size_bytes=self._traffic.written_bytes,
                    requests=self._traffic.requests,
                    retries=self._traffic.retries,
                    error_type=None if error is None else type(error).__name__,
                    is_fast=is_fast,
                )
            )

    def timings(self, reports: Sequence[Mapping[str, Any]]) -> Timings:
        """Leader: what the save took so far, from the reports of all ranks. The manifest is written next."""
        longest = longest_seconds(reports)
        wait = longest - _stored_seconds(self._seconds)
        commit = round(max(0.0, time.monotonic() - self._mark - wait), _DIGITS)
        ranks = []
        for report in reports:
            rank, seconds, stalled = report["rank"], dict(report["seconds"]), report["stalled_seconds"]
            seconds["wait"] = round(longest - _stored_seconds(seconds), _DIGITS)
            if report["stalls"]:
                stalled = round(sum(seconds.values()) + commit, _DIGITS)
            if rank == self._rank:
                seconds["commit"] = commit
            counts = report["size_bytes"], report["requests"], report["retries"]
            ranks.append(RankTimings(rank, report["node"], seconds, *counts, stalled))
        return Timings.of(ranks, seconds=round(self.elapsed_seconds, _DIGITS))


def longest_seconds(reports: Sequence[Mapping[str, Any]]) -> float:
    """How long the slowest rank took, from hearing the agreement, to store its files."""
    return max(_stored_seconds(report["seconds"]) for report in reports)


def _stored_seconds(seconds: Mapping[str, float]) -> float:
    return seconds.get("stage", 0.0) + seconds["upload"]
