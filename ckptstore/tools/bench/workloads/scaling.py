"""Measure the growth of a save with ranks, bytes and files, and of a commit through the storage with ranks."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckptstore.testing import RanksFailed, run_ranks
from ckptstore.tools.bench.destination import Place
from ckptstore.tools.bench.figures.report import Workload
from ckptstore.tools.bench.figures.text import absent
from ckptstore.tools.bench.work import Contests, Task
from ckptstore.tools.bench.workloads.files import files_of
from ckptstore.tools.bench.workloads.sharded_ranks import NUM_TENSORS, commit_of_sharded
from ckptstore.tools.bench.workloads.simulated import commit_of

REAL_RANKS = (1, 2, 4, 8)
SIMULATED_RANKS = (64, 256, 1024, 4096, 16_384)
_SIZES = (16, 4, 1)
"""Divisors of the whole size."""
_FILE_COUNTS = (10, 100, 1000)
_FILES_BYTES = 256 << 20
_TIMEOUT_SECONDS = 1800.0
_SHOWN_CHARACTERS = 500
_LATENCY_SECONDS = 0.005
_FIGURES = ("seconds", "requests", "cpu_seconds", "peak_bytes")
_SHARDED_FIGURES = ("seconds", "cpu_seconds", "peak_bytes", "told_bytes", "agree_bytes", "outline_bytes")

Show = Callable[[str, int, int], None]


def scaling(task: Task, contests: Contests, show: Show) -> dict[str, Any]:
    """Return curves of real processes, and of simulated ranks with the law of their growth."""
    options, place = task.options, task.place
    ranks = [_point(count, task, contests, count) for count in REAL_RANKS if count <= max(8, options.ranks)]
    sizes = []
    for part in _SIZES:
        size_bytes = max(1 << 20, task.size_bytes // part)
        sizes.append(_point(size_bytes, replace(task, size_bytes=size_bytes), contests, options.ranks))
    files, some = [], replace(task, name="directory", size_bytes=min(task.size_bytes, _FILES_BYTES))
    for count in _FILE_COUNTS:  # the same bytes in more and more files
        with files_of(some, count) as (path, facts):
            files.append(_point(facts["files"], replace(some, files=str(path)), contests, options.ranks))
    latency_seconds = _LATENCY_SECONDS if options.latency_seconds is None else options.latency_seconds
    return {
        "real": {"ranks": ranks, "bytes": sizes, "files": files},
        "simulated": simulate(place, max_ranks=options.max_ranks, latency_seconds=latency_seconds, show=show),
        "sharded": simulate_sharded(place, max_ranks=options.max_ranks, show=show),
    }


def _point(at: int, task: Task, contests: Contests, ranks: int) -> dict[str, Any]:
    """Return median and samples of the seconds of each measured contender at a point; and the absent ones."""
    found: Workload = contests([task], ranks)[0]
    seconds = {one.name: {"median": found.median(one), "samples": found.figures(one)} for one in found.all_measured()}
    return {"at": at, "size_bytes": found.size_bytes, "seconds": seconds, "absent": absent(found)}


def simulate(place: Place, *, max_ranks: int, latency_seconds: float, show: Show) -> dict[str, Any]:
    """Measure commits of a real leader with so many simulated ranks, and the laws that fit.

    On a local disk, whose latency is injected.
    """
    found = _points(place, max_ranks, "commit", commit_of, latency_seconds, show=show)
    return {"latency_seconds": latency_seconds, **found, "laws": laws(found["points"], _FIGURES)}


def simulate_sharded(place: Place, *, max_ranks: int, show: Show) -> dict[str, Any]:
    """Measure commits of a state of many tensors, each divided over all ranks, which torch.distributed connects.

    Without latency.
    """
    found = _points(place, max_ranks, "fully sharded state", commit_of_sharded, NUM_TENSORS, show=show)
    return {"tensors": NUM_TENSORS, **found, "laws": laws(found["points"], _SHARDED_FIGURES)}


def _points(
    place: Place, max_ranks: int, what: str, commit: Callable[..., dict[str, Any]], *more: Any, show: Show
) -> dict[str, Any]:
    """Return the measurements of `commit` for a directory, a number of ranks and more, each in a process of its own.

    Where one fails, its reason stands for all of more ranks.
    """
    above = place.path if place.is_local else None
    points: list[dict[str, Any]] = []
    for count in [count for count in SIMULATED_RANKS if count <= max_ranks]:
        show(f"ranks: {what} of {count} simulated ranks", len(points), len(SIMULATED_RANKS))
        with tempfile.TemporaryDirectory(prefix="ckptstore-bench-ranks-", dir=above) as directory:
            try:
                points += run_ranks(1, commit, f"{directory}/run", count, *more, timeout_seconds=_TIMEOUT_SECONDS)
            except RanksFailed as error:
                reason = f"failed: {what} of {count} simulated ranks: {str(error)[:_SHOWN_CHARACTERS]}"
                return {"points": points, "absent": [reason]}
    return {"points": points, "absent": []}


def laws(points: Sequence[Mapping[str, Any]], figures: Sequence[str]) -> dict[str, Any]:
    """For each figure return the fitted line, and the power of the ranks by which it grows between the two largest."""
    found: dict[str, Any] = {}
    if len(points) < 2:
        return found
    numbers = [float(point["ranks"]) for point in points]
    for name in figures:
        values = [point[name] for point in points]
        if any(value is None for value in values):
            continue
        base, slope, error = line(numbers, values)
        found[name] = {
            "base": base,
            "slope": slope,
            "error": round(error, 4),
            "exponent": round(exponent(numbers[-2:], values[-2:]), 3),
            "text": f"{base:.4g} + {slope:.4g} n (within {error:.0%})",
        }
    return found


def line(numbers: Sequence[float], values: Sequence[float]) -> tuple[float, float, float]:
    """Return base, slope and largest relative error of the line with the smallest relative errors, so that small sizes
    count as much as large ones.

    Raises ValueError for fewer than two different numbers.
    """
    base, slope = _fitted(numbers, values, [1.0 / max(1e-12, value) ** 2 for value in values])
    errors = [abs(base + slope * n - v) / max(1e-12, v) for n, v in zip(numbers, values, strict=True)]
    return base, slope, max(errors)


def exponent(numbers: Sequence[float], values: Sequence[float]) -> float:
    """Return the power of n by which values grow: 1 is linear, 2 quadratic. Raises ValueError below two numbers."""
    logarithms = [math.log(max(1e-12, value)) for value in values]
    return _fitted([math.log(number) for number in numbers], logarithms, [1.0] * len(values))[1]


def _fitted(xs: Sequence[float], ys: Sequence[float], weights: Sequence[float]) -> tuple[float, float]:
    """Return base and slope of the line with the smallest weighted squares. Raises ValueError below two numbers."""
    total = sum(weights)
    mean_x = sum(w * x for w, x in zip(weights, xs, strict=True)) / total
    mean_y = sum(w * y for w, y in zip(weights, ys, strict=True)) / total
    spread = sum(w * (x - mean_x) ** 2 for w, x in zip(weights, xs, strict=True))
    if spread <= 0:
        raise ValueError("a law takes two different numbers")
    slope = sum(w * (x - mean_x) * (y - mean_y) for w, x, y in zip(weights, xs, ys, strict=True)) / spread
    return mean_y - slope * mean_x, slope
