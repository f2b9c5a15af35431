"""Divide one save of each rank into phases, from the calls of its storage and its events."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ckptstore.events import CheckpointCommitted, Event, StateStaged
from ckptstore.testing import Call

_PHASES = {
    **dict.fromkeys(("write", "write_part", "write_many", "open_parts", "finish"), "upload"),
    "persist": "flush",
}
"""The phase of a thread, by the verb of its call for a file of this rank."""


class _Recorded(NamedTuple):
    """One call of the storage."""

    start: float
    end: float
    thread: int
    verb: str
    key: str
    size_bytes: int


class Recorder:
    """Records every call of a storage, as a hook, and events, as a listener. Times are monotonic."""

    started = ended = 0.0
    _staged: float | None = None
    _committed: float | None = None

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._calls: list[_Recorded] = []
        self._begun: dict[int, float] = {}
        self._lock = threading.Lock()

    def __call__(self, call: Call) -> None:
        now, thread = time.monotonic(), threading.get_ident()
        with self._lock:
            if call.phase == "before":
                self._begun[thread] = now
            elif (start := self._begun.pop(thread, None)) is not None:
                self._calls.append(_Recorded(start, now, thread, call.verb, call.key, call.size_bytes))

    def on_event(self, event: Event) -> None:
        """Record an event."""
        if isinstance(event, StateStaged):
            self._staged = time.monotonic()
        elif isinstance(event, CheckpointCommitted):
            self._committed = time.monotonic()

    def _inside(self) -> list[_Recorded]:
        return sorted(one for one in self._calls if self.started <= one.start <= self.ended)

    def counts(self) -> dict[str, int]:
        """Count the calls by verb between start and end."""
        return Counter(one.verb for one in self._inside())

    def phases(self) -> dict[str, Any]:
        """Return the rank's spans, in seconds of the machine's clock: work by threads, then waits and commit."""
        own = [one for one in self._inside() if one.verb in _PHASES and f"-rank={self._rank:05d}" in one.key]
        lanes: dict[int, int] = {}
        last: dict[int, _Recorded] = {}
        spans = []
        for one in own:
            lane, before = lanes.setdefault(one.thread, len(lanes)), last.get(one.thread)
            spans.append(_span(_PHASES[one.verb], lane, one.start, one.end, one.key, one.size_bytes))
            if one.verb == "persist":
                continue
            # Between two parts of a file a thread reads and hashes the next one.
            if before and before.key == one.key and one.verb == "write_part" and one.start > before.end:
                spans.append(_span("hash", lane, before.end, one.start, one.key, one.size_bytes))
            last[one.thread] = one
        begun = min((one["start"] for one in spans), default=self.ended)
        stored = max((one["end"] for one in spans), default=begun)
        if self._staged is not None:
            spans.append(_span("stage", 0, self.started, self._staged, "agree and copy"))
        else:
            spans.append(_span("agree", 0, self.started, begun, "who writes what"))
        end = self._committed or self.ended
        spans.append(_span("wait", 0, stored, end, "for the other ranks and the commit"))
        return {"rank": self._rank, "start": self.started, "end": end, "stored": stored, "spans": spans}


def _span(phase: str, lane: int, start: float, end: float, what: str, size_bytes: int = 0) -> dict[str, Any]:
    span = {"phase": phase, "lane": lane, "start": start, "end": max(start, end), "what": what}
    return {**span, "size_bytes": size_bytes if phase != "flush" else 0}


def aligned(ranks: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Put all ranks on one clock that begins with the first of them, sorted by rank; times in seconds.

    The leader commits from the moment at which the last rank had stored its files.
    """
    zero = min((rank["start"] for rank in ranks), default=0.0)
    all_stored = max((rank["stored"] for rank in ranks), default=0.0)

    def moved(item: Mapping[str, Any]) -> dict[str, Any]:
        times = {name: round(item[name] - zero, 6) for name in ("start", "end", "stored") if name in item}
        return {**item, **times}

    found = []
    for rank in sorted(ranks, key=lambda rank: int(rank["rank"])):
        spans = rank["spans"]
        if rank["rank"] == 0:
            begun = min(max(all_stored, rank["stored"]), rank["end"])
            spans = [span for span in spans if span["phase"] != "wait"]
            spans.append(_span("wait", 0, rank["stored"], begun, "for the other ranks"))
            spans.append(_span("commit", 0, begun, rank["end"], "index, manifest, record"))
        ordered = sorted(map(moved, spans), key=lambda span: (span["lane"], span["start"]))
        found.append({**moved(rank), "spans": ordered})
    return found


def straggler(ranks: Sequence[Mapping[str, Any]]) -> tuple[int, float] | None:
    """Return the rank that stored its files last, and its seconds after the median rank.

    None for one rank, or when all ended within a tenth of the save.
    """
    if len(ranks) < 2:
        return None
    ordered = sorted(ranks, key=lambda rank: float(rank["stored"]))
    late = ordered[-1]["stored"] - ordered[(len(ordered) - 1) // 2]["stored"]
    whole = max(rank["end"] for rank in ranks) - min(rank["start"] for rank in ranks)
    return (ordered[-1]["rank"], late) if late > 0.1 * whole else None
