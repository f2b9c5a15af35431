"""Time a save on each rank, phase by phase, and combine the timings on the leader for the manifest.

    agree    from the call until the rank has the agreement, including the wait for a save in flight
    stage    asynchronous saves: until the copy is made
    upload   until the rank has stored its files
    wait     until all ranks have stored theirs
    commit   on the leader, until it writes the manifest

Each rank measures from the moment at which it has the agreement, by its own clock. All wait for the rank that takes
longest, so clocks of different nodes are never compared.
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
"""The decimals of seconds that are kept."""


class SaveClock:
    """The phases of one save on one rank, one right after the other. The end of each emits an event."""

    def __init__(self) -> None:
        """Start the clock at the call of the save."""
        self._called = self._mark = time.monotonic()
        self._rank = 0
        self._step = 0
        self._attempt: str | None = None
        self._released_seconds: float | None = None
        self._seconds: dict[str, float] = {}
        self._traffic = Traffic()

    @property
    def elapsed_seconds(self) -> float:
        """The seconds since the call."""
        return time.monotonic() - self._called

    def asked(self, *, step: int, rank: int) -> None:
        """Note step and rank of the save, before the agreement."""
        self._step, self._rank = step, rank

    def agreed(self, attempt: str, *, step: int, rank: int) -> None:
        """Note the attempt that the ranks agreed on, and end the phase "agree"."""
        self._attempt, self._step, self._rank = attempt, step, rank
        self.ended("agree")

    def traced(self, attempt: str) -> Traced:
        """Note the name of the attempt, and return the save as a tracer sees it."""
        self._attempt = attempt
        return Traced("save", attempt, self._rank, self._step, time.time() - self.elapsed_seconds)

    def ended(self, phase: str, seconds: float | None = None) -> None:
        """End a phase, now or after `seconds`. It began at the end of the phase before."""
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
        """Note that the call returns to the training, and return the seconds for which it held it up."""
        self._released_seconds = self.elapsed_seconds
        return self._released_seconds

    def report(self, traffic: Traffic, *, node: str) -> dict[str, Any]:
        """Return the report of this rank to the leader, as JSON, once its files are stored."""
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
        """End the last phases, now that this rank knows the outcome: "wait" until the slowest rank was done, "commit"
        after that.

        If `longest_seconds` is None, the time of the slowest rank is unknown, and all of the rest counts as "wait".
        """
        if longest_seconds is None:
            self.ended("wait")
        else:
            self.ended("wait", max(0.0, longest_seconds - _stored_seconds(self._seconds)))
            self.ended("commit")

    @contextmanager
    def part(self, store: str, *, is_last: bool, is_fast: bool = False) -> Iterator[None]:
        """Run a part of the save in this context, to the store with that URI or, with `is_fast`, to nodes.

        An error or the end of the last part ends the save, and emits `SaveEnded`.
        """
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
        """Leader: build the timings of the save so far from the reports of all ranks, right before the manifest."""
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
    """Return the seconds from the agreement until the slowest rank had stored its files."""
    return max(_stored_seconds(report["seconds"]) for report in reports)


def _stored_seconds(seconds: Mapping[str, float]) -> float:
    return seconds.get("stage", 0.0) + seconds["upload"]
