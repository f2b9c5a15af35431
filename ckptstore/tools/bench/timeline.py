"""Divide one save of each rank into phases, from the calls of its storage and its events."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckptstore.events import CheckpointCommitted, Event, StateStaged
from ckptstore.testing import Call

PHASES = ("agree", "stage", "hash", "upload", "flush", "wait", "commit")
_UPLOADS = frozenset({"write", "write_part", "write_many", "open_parts", "finish"})


@dataclass(slots=True)
class RecordedCall:
    """One call of the storage."""

    verb: str
    key: str
    thread: int
    start: float
    end: float = 0.0
    size_bytes: int = 0


@dataclass(kw_only=True)
class Recorder:
    """Records every call of a storage, as a hook, and events, as a listener. Times are monotonic."""

    rank: int
    started: float = 0.0
    ended: float = 0.0
    staged: float | None = None
    committed: float | None = None
    calls: list[RecordedCall] = field(default_factory=list)
    _open: dict[int, RecordedCall] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, call: Call) -> None:
        now, thread = time.monotonic(), threading.get_ident()
        with self._lock:
            if call.phase == "before":
                self._open[thread] = RecordedCall(call.verb, call.key, thread, now, size_bytes=call.size_bytes)
            elif (seen := self._open.pop(thread, None)) is not None:
                seen.end = now
                self.calls.append(seen)

    def on_event(self, event: Event) -> None:
        """Record an event."""
        if isinstance(event, StateStaged):
            self.staged = time.monotonic()
        elif isinstance(event, CheckpointCommitted):
            self.committed = time.monotonic()

    def counts(self) -> dict[str, int]:
        """Count the calls by verb between start and end."""
        return Counter(seen.verb for seen in self._inside())

    def _inside(self) -> list[RecordedCall]:
        return sorted((one for one in self.calls if self.started <= one.start <= self.ended), key=lambda one: one.start)

    def phases(self) -> dict[str, Any]:
        """Return the rank's spans, in seconds of the machine's clock: work by threads, then waits and commit."""
        calls = self._inside()
        own = [one for one in calls if one.verb in _UPLOADS and f"-rank={self.rank:05d}" in one.key]
        flushes = [one for one in calls if one.verb == "persist" and f"-rank={self.rank:05d}" in one.key]
        lanes = {thread: lane for lane, thread in enumerate(dict.fromkeys(one.thread for one in (*own, *flushes)))}
        spans = [_span("upload", lanes[one.thread], one.start, one.end, one.key, one.size_bytes) for one in own]
        spans += [_span("flush", lanes[one.thread], one.start, one.end, one.key) for one in flushes]
        spans += _hashing(own, lanes)
        begun = min((one["start"] for one in spans), default=self.ended)
        stored = max((one["end"] for one in spans), default=begun)
        if self.staged is not None:
            spans.append(_span("stage", 0, self.started, self.staged, "agree and copy"))
        else:
            spans.append(_span("agree", 0, self.started, begun, "who writes what"))
        end = self.committed or self.ended
        spans.append(_span("wait", 0, stored, end, "for the other ranks and the commit"))
        return {"rank": self.rank, "start": self.started, "end": end, "stored": stored, "spans": spans}


def _span(phase: str, lane: int, start: float, end: float, what: str, size_bytes: int = 0) -> dict[str, Any]:
    span = {"phase": phase, "lane": lane, "start": start, "end": max(start, end), "what": what}
    return {**span, "size_bytes": size_bytes}


def _hashing(own: Sequence[RecordedCall], lanes: Mapping[int, int]) -> list[dict[str, Any]]:
    """Return the spans between two parts of a file, when a thread reads and hashes the next one."""
    found: list[dict[str, Any]] = []
    before: dict[int, RecordedCall] = {}
    for one in own:
        last = before.get(one.thread)
        if last is not None and last.key == one.key and one.verb == "write_part" and one.start > last.end:
            found.append(_span("hash", lanes[one.thread], last.end, one.start, one.key, one.size_bytes))
        before[one.thread] = one
    return found


def aligned(ranks: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Put all ranks on one clock that begins with the first of them, sorted by rank; times in seconds.

    The leader commits from the moment at which the last rank had stored its files.
    """
    zero = min((rank["start"] for rank in ranks), default=0.0)
    all_stored = max((rank["stored"] for rank in ranks), default=0.0)

    def moved(span: Mapping[str, Any]) -> dict[str, Any]:
        return {**span, "start": round(span["start"] - zero, 6), "end": round(span["end"] - zero, 6)}

    return [
        {
            **moved(rank),
            "stored": round(rank["stored"] - zero, 6),
            "spans": sorted(map(moved, _divided(rank, all_stored)), key=lambda span: (span["lane"], span["start"])),
        }
        for rank in sorted(ranks, key=lambda rank: rank["rank"])
    ]


def _divided(rank: Mapping[str, Any], all_stored: float) -> list[Mapping[str, Any]]:
    """Return a rank's spans; the leader's wait is divided into its real wait and its commit."""
    if rank["rank"] != 0:
        return list(rank["spans"])
    found = [span for span in rank["spans"] if span["phase"] != "wait"]
    begun = min(max(all_stored, rank["stored"]), rank["end"])
    found.append(_span("wait", 0, rank["stored"], begun, "for the other ranks"))
    found.append(_span("commit", 0, begun, rank["end"], "index, manifest, record"))
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
