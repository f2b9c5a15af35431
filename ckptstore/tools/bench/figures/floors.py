"""Check floors below which a ratio may not fall: a guard against getting slower, by ratios of one run alone.

A file of floors is a list of {"workload", "contender", "slowest_of" or "role", "floor", "why"}: ckptstore's median must
be so many times as fast as that contender's, as that of the slowest of some, or as the best one of a role ("peer" or
"limit").
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptstore.errors import InvalidInput
from ckptstore.tools.bench.figures.report import Report, Workload

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
            against, ratio = _other(workload, floor)
            verdicts.append(FloorVerdict(workload=name, against=against, floor=float(floor["floor"]), ratio=ratio))
    return verdicts


def _other(workload: Workload, floor: Mapping[str, Any]) -> tuple[str, float | None]:
    """Return the opponent of a floor in words, and its ratio; None if one of them was not measured."""
    if "role" in floor:
        return f"the best {floor['role']}", workload.ratio(workload.best(floor["role"]))
    names = floor.get("slowest_of", [floor.get("contender")])
    ratios = [workload.ratio(workload.measured(name)) for name in names]
    text = f"the slowest of {' and '.join(names)}" if "slowest_of" in floor else names[0]
    return text, None if None in ratios else max(filter(None, ratios), default=None)
