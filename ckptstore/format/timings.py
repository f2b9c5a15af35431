"""The timings of a save, as its manifest has them (format-v1, "Timings"). Pure values.

They are for people. No decision depends on them, so a reader that cannot read them goes on without.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

PHASES = ("agree", "stage", "upload", "wait", "commit")
"""The phases of a save, in their order."""

MAX_RANKS = 64
"""The most ranks that are kept one by one; of more, only the extremes of each phase are."""
_MAX_SLOWEST = 3
_MAX_SECONDS = 1e9
_MAX_COUNT = 1 << 63
_NO_NODE = re.compile(r"[^\w.:@+-]")
_MAX_NODE_CHARS = 255


@dataclass(frozen=True, slots=True)
class RankTimings:
    """The timings of one rank."""

    rank: int
    node: str
    """The host that it ran on."""
    seconds: Mapping[str, float]
    """The seconds of each phase that it had: "stage" in asynchronous saves only, "commit" on the leader only."""
    size_bytes: int
    """The bytes written in its phase "upload"."""
    requests: int
    """The requests to the storage in its phase "upload", retries included."""
    retries: int
    """The number of these requests that were made again after a failure."""
    stalled_seconds: float
    """The time for which the save held up its training loop."""

    def to_json(self) -> dict[str, Any]:
        """Return the timings of a rank as an entry of the manifest."""
        return {
            "rank": self.rank,
            "node": self.node,
            "seconds": {phase: self.seconds[phase] for phase in PHASES if phase in self.seconds},
            "size_bytes": self.size_bytes,
            "requests": self.requests,
            "retries": self.retries,
            "stalled_seconds": self.stalled_seconds,
        }

    @staticmethod
    def from_json(entry: Mapping[str, Any]) -> RankTimings:
        """Return the timings of an entry; raise KeyError, TypeError or ValueError if it is not one."""
        node = entry["node"]
        if not isinstance(node, str) or node != clean_node(node):
            raise ValueError("a node is not the name of a host")
        return RankTimings(
            rank=_count(entry["rank"]),
            node=node,
            seconds={phase: _seconds(value) for phase, value in _by_phase(entry["seconds"]).items()},
            size_bytes=_count(entry["size_bytes"]),
            requests=_count(entry["requests"]),
            retries=_count(entry["retries"]),
            stalled_seconds=_seconds(entry["stalled_seconds"]),
        )


@dataclass(frozen=True, slots=True)
class Spread:
    """The spread of seconds over the ranks that have them."""

    minimum: float
    median: float
    maximum: float
    slowest: tuple[int, ...]
    """The ranks that took longest, the slowest first, at most 3."""

    @staticmethod
    def of(seconds: Mapping[int, float]) -> Spread:
        """Return the spread of the seconds of at least one rank. Of two equally slow ranks the lower one is first."""
        order = sorted((-took, rank) for rank, took in seconds.items())
        middle = len(order) // 2
        median = -order[middle][0] if len(order) % 2 else -(order[middle - 1][0] + order[middle][0]) / 2
        slowest = tuple(rank for _, rank in order[:_MAX_SLOWEST])
        return Spread(0.0 - order[-1][0], 0.0 + median, 0.0 - order[0][0], slowest)

    def to_json(self) -> dict[str, Any]:
        """Return the spread as the manifest has it."""
        slowest = list(self.slowest)
        return {"minimum": self.minimum, "median": self.median, "maximum": self.maximum, "slowest": slowest}

    @staticmethod
    def from_json(entry: Mapping[str, Any]) -> Spread:
        """Return the spread of an entry; raise KeyError, TypeError or ValueError if it is not one."""
        minimum, median, maximum = (_seconds(entry[name]) for name in ("minimum", "median", "maximum"))
        slowest = entry["slowest"]
        if not minimum <= median <= maximum:
            raise ValueError("a spread is not in ascending order")
        if not isinstance(slowest, list) or not 1 <= len(slowest) <= _MAX_SLOWEST:
            raise ValueError("the slowest ranks are no short list")
        return Spread(minimum, median, maximum, tuple(map(_count, slowest)))


@dataclass(frozen=True, slots=True)
class Timings:
    """The timings of a save, over all ranks."""

    seconds: float
    """The seconds of the leader, from the call to the moment at which it writes the manifest."""
    phases: Mapping[str, Spread]
    """The spread of each phase that any rank had, by its name in PHASES."""
    size_bytes: int
    """The bytes that all ranks wrote in their phase "upload"."""
    requests: int
    retries: int
    stalled: Spread
    """The spread of the times for which the save held up the training loops."""
    ranks: tuple[RankTimings, ...]
    """All ranks, if at most 64; else the fastest one and the slowest ones of each phase. In ascending order."""

    @staticmethod
    def of(ranks: Sequence[RankTimings], *, seconds: float) -> Timings:
        """Return the timings of all ranks together, of which there is at least one."""
        by_phase = {phase: {one.rank: one.seconds[phase] for one in ranks if phase in one.seconds} for phase in PHASES}
        stalls = {one.rank: one.stalled_seconds for one in ranks}
        phases = {phase: Spread.of(values) for phase, values in by_phase.items() if values}
        stalled, kept = Spread.of(stalls), ranks
        if len(ranks) > MAX_RANKS:
            measured = [(stalls, stalled), *((by_phase[phase], spread) for phase, spread in phases.items())]
            extreme = {
                rank for values, spread in measured for rank in (min(values, key=values.__getitem__), *spread.slowest)
            }
            kept = [one for one in ranks if one.rank in extreme]
        return Timings(
            seconds=seconds,
            phases=phases,
            size_bytes=sum(one.size_bytes for one in ranks),
            requests=sum(one.requests for one in ranks),
            retries=sum(one.retries for one in ranks),
            stalled=stalled,
            ranks=tuple(sorted(kept, key=lambda one: one.rank)),
        )

    def to_json(self) -> dict[str, Any]:
        """Return the field `timings` of a manifest."""
        return {
            "seconds": self.seconds,
            "phases": {phase: self.phases[phase].to_json() for phase in PHASES if phase in self.phases},
            "size_bytes": self.size_bytes,
            "requests": self.requests,
            "retries": self.retries,
            "stalled": self.stalled.to_json(),
            "ranks": [one.to_json() for one in self.ranks],
        }

    @staticmethod
    def from_json(value: Any) -> Timings | None:
        """Return the timings of a field; None if there is none, or it is not what a save writes.

        Phases that this version does not know are left out.
        """
        try:
            if not isinstance(value["ranks"], list) or not 1 <= len(value["ranks"]) <= MAX_RANKS:
                raise ValueError("there are no ranks, or more than a manifest has")
            ranks = tuple(RankTimings.from_json(entry) for entry in value["ranks"])
            if [one.rank for one in ranks] != sorted({one.rank for one in ranks}):
                raise ValueError("the ranks are not in ascending order")
            return Timings(
                seconds=_seconds(value["seconds"]),
                phases={phase: Spread.from_json(entry) for phase, entry in _by_phase(value["phases"]).items()},
                size_bytes=_count(value["size_bytes"]),
                requests=_count(value["requests"]),
                retries=_count(value["retries"]),
                stalled=Spread.from_json(value["stalled"]),
                ranks=ranks,
            )
        except (KeyError, TypeError, ValueError, AttributeError):
            return None


def clean_node(node: str) -> str:
    """Return a node's name as timings have it: letters, digits and ``. _ : @ + -``, at most 255 of them."""
    return _NO_NODE.sub("-", node)[:_MAX_NODE_CHARS] or "unknown"


def _by_phase(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError("what should have a value for each phase has not")
    return {phase: value[phase] for phase in PHASES if phase in value}


def _seconds(value: Any) -> float:
    return float(_within(value, (int, float), _MAX_SECONDS))


def _count(value: Any) -> int:
    return int(_within(value, (int,), _MAX_COUNT))


def _within(value: Any, kinds: Sequence[Callable[..., Any]], limit: float) -> Any:
    if type(value) not in kinds or not 0 <= value < limit:
        raise ValueError("a number is none, or out of range")
    return value
