"""Check floors below which a ratio may not fall: a guard against getting slower, by ratios of one run alone.

A file of floors is a list of {"workload", "contender", "slowest_of" or "role", "floor", "why"}: ckptstore's median must
be so many times as fast as that contender's, as that of the slowest of some, or as the best one of a role ("peer" or
"limit").
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptstore.errors import InvalidInput
from ckptstore.tools.bench.figures.report import Report, Workload, WorkloadOutcome

_AGAINST = ("contender", "slowest_of", "role")


@dataclass(frozen=True, slots=True, kw_only=True)
class FloorVerdict:
    """One floor and the measured ratio."""

    workload: str
    against: str
    floor: float
    ratio: float | None
    """None if it was not measured."""

    @property
    def holds(self) -> bool:
        """True if the ratio was measured and is not below the floor."""
        return self.ratio is not None and self.ratio >= self.floor

    def __str__(self) -> str:
        found = "not measured" if self.ratio is None else f"{self.ratio:.3f}"
        return f"{'ok' if self.holds else 'BELOW'}: {self.workload} against {self.against}: {found}, floor {self.floor}"


def read_floors(path: Path) -> list[dict[str, Any]]:
    """Read a file of floors. Raises InvalidInput for any other file."""
    try:
        found = [dict(one) for one in json.loads(path.read_text())["floors"]]
        for one in found:
            if not {"workload", "floor"} <= one.keys() or not {*_AGAINST} & one.keys():
                raise ValueError(f"{one} lacks a field")
            if len({*_AGAINST} & one.keys()) > 1 or one.keys() - {"workload", "floor", "why", *_AGAINST}:
                raise ValueError(f"{one} has a field too many")
            if not 0 < float(one["floor"]) < math.inf or one.get("role", "peer") not in ("peer", "limit"):
                raise ValueError(f"{one} has a floor that is no number above 0, or another role than peer and limit")
        if not found:
            raise ValueError("it is empty")
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise InvalidInput(f"{path} holds no floors: {error}") from error
    return found


def check(report: Report, floors: Sequence[Mapping[str, Any]]) -> list[FloorVerdict]:
    """Check every floor of a workload in the report, at each of its sizes.

    One whose contender was not measured does not hold.
    """
    verdicts = []
    for floor in floors:
        found = [one for one in report.workloads if one.name == floor["workload"]]
        for workload in found:
            name = workload.name if len(found) == 1 else f"{workload.name}, {workload.title}"
            against, other = _other(workload, floor)
            ratio = workload.ratio(other) if other else None
            verdicts.append(FloorVerdict(workload=name, against=against, floor=float(floor["floor"]), ratio=ratio))
    return verdicts


def _other(workload: Workload, floor: Mapping[str, Any]) -> tuple[str, WorkloadOutcome | None]:
    """Return the opponent of a floor in words, and its figures; None if one of them was not measured."""
    if "slowest_of" in floor:
        found = [one for name in floor["slowest_of"] if (one := workload.measured(name)) is not None]
        is_whole = len(found) == len(floor["slowest_of"]) > 0
        slowest = max(found, key=lambda one: statistics.median(workload.figures(one))) if is_whole else None
        return f"the slowest of {' and '.join(floor['slowest_of'])}", slowest
    if "contender" in floor:
        return floor["contender"], workload.measured(floor["contender"])
    return f"the best {floor['role']}", workload.best(floor["role"])
