"""Compare two reports, and test if the spread of the samples supports a change.

The test is Wilcoxon's rank sum (Mann and Whitney's U) on the raw samples, exact for small numbers of them: of all ways
to divide the samples among the two runs, the share that differ at least as much. It assumes nothing of their
distribution; it cannot see a machine that was slower during all of one run, so ratios to the limit of the same run are
compared too.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any, Literal

from ckptstore.tools.bench.figures.report import Report, Workload, WorkloadOutcome

ALPHA = 0.05
_MOST_DIVISIONS = 200_000

Verdict = Literal["faster", "slower", "no change shown", "too few samples"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One contender in one workload of both runs."""

    workload: str
    contender: str
    before_seconds: float
    after_seconds: float
    speedup: float
    """The median before over the median after: above 1, it got faster."""
    p_value: float
    verdict: Verdict
    limit_before: float | None
    """The limit's median over its own, in the first run; None without a limit."""
    limit_after: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """All changes, and the differences that make the runs hard to compare."""

    changes: tuple[Change, ...]
    differences: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the comparison as in the schema."""
        return {
            "version": 1,
            "kind": "ckptstore-bench-comparison",
            "alpha": ALPHA,
            "changes": [asdict(change) for change in self.changes],
            "differences": list(self.differences),
        }


def compare(before: Report, after: Report) -> Comparison:
    """Compare the measurements of both reports: workloads by name, size and ranks, contenders by name."""
    earlier = {_key(workload): workload for workload in before.workloads}
    changes = [
        _change(old, was, workload, one)
        for workload in after.workloads
        if (old := earlier.get(_key(workload))) is not None
        for one in workload.all_measured()
        if (was := old.measured(one.name)) is not None
    ]
    differences = [*_differences(before, after), *_in_one_alone(before, after)]
    return Comparison(changes=tuple(changes), differences=tuple(differences))


def _key(workload: Workload) -> tuple[Any, ...]:
    return workload.name, workload.size_bytes, workload.ranks, workload.title


def _change(old: Workload, was: WorkloadOutcome, new: Workload, one: WorkloadOutcome) -> Change:
    before, after = old.median(was), new.median(one)
    p_value = rank_sum_p(old.figures(was), new.figures(one))
    if smallest_p(len(was.samples), len(one.samples)) > ALPHA:
        verdict: Verdict = "too few samples"
    elif p_value > ALPHA:
        verdict = "no change shown"
    else:
        verdict = "faster" if after < before else "slower"
    limits = [
        workload.median(limit) / seconds if (limit := workload.best("limit")) else None
        for workload, seconds in ((old, before), (new, after))
    ]
    return Change(
        workload=new.title,
        contender=one.name,
        before_seconds=before,
        after_seconds=after,
        speedup=before / max(1e-9, after),
        p_value=p_value,
        verdict=verdict,
        limit_before=limits[0],
        limit_after=limits[1],
    )


def _differences(before: Report, after: Report) -> Iterator[str]:
    for what, first, second in (
        ("machine", before.machine, after.machine),
        ("version of", before.versions, after.versions),
        ("setting", before.asked, after.asked),
    ):
        for name in sorted({*first, *second} - {"load_average"}):
            if first.get(name) != second.get(name):
                yield f"{what} {name}: {first.get(name)} before, {second.get(name)} after"


def _in_one_alone(before: Report, after: Report) -> Iterator[str]:
    """Yield what was measured in one of two reports and has no row for that: workloads, and contenders of both."""
    first, second = ({_key(one): one for one in report.workloads} for report in (before, after))
    for key in dict.fromkeys([*first, *second]):
        was, now = first.get(key), second.get(key)
        title = f"{key[-1]} ({key[0]}, {key[1]} bytes, {key[2]} ranks)"
        if was is None or now is None:
            yield f"workload {title}: {'not ' if was is None else ''}before, {'not ' if now is None else ''}after"
            continue
        for name in dict.fromkeys(one.name for one in (*was.outcomes, *now.outcomes)):
            if (was.measured(name) is None) != (now.measured(name) is None):
                yield f"{name} in {title}: {_became(was, name)} before, {_became(now, name)} after"


def _became(workload: Workload, name: str) -> str:
    found = next((one for one in workload.outcomes if one.name == name), None)
    if found is None:
        return "not there"
    return found.status if found.reason is None else f"{found.status} ({found.reason})"


def rank_sum_p(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the two-sided p-value that both samples come from one distribution; equal values share their ranks.

    Exact up to some hundred thousand divisions, beyond that by the normal distribution with a correction for ties.
    """
    ordered = sorted([*first, *second])
    ranks = [(bisect_left(ordered, value) + bisect_right(ordered, value) + 1) / 2 for value in (*first, *second)]
    size, total = len(first), len(ranks)
    middle = size * (total + 1) / 2
    seen = abs(sum(ranks[:size]) - middle)
    if math.comb(total, size) <= _MOST_DIVISIONS:
        extreme = sum(abs(sum(chosen) - middle) >= seen - 1e-9 for chosen in combinations(ranks, size))
        return extreme / math.comb(total, size)
    ties = sum(count**3 - count for count in Counter(ranks).values()) / (total * (total - 1))
    variance = size * (total - size) / 12 * (total + 1 - ties)
    return math.erfc(max(0.0, seen - 0.5) / math.sqrt(2 * variance)) if variance > 0 else 1.0


def smallest_p(size: int, other: int) -> float:
    """Return the smallest p-value that so many samples can give."""
    return min(1.0, 2 / math.comb(size + other, size))
