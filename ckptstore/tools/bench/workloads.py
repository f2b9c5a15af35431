"""Workloads of several contests: a store that grows, a fast tier, GPUs, and growth with ranks, bytes and files.

Each takes its task and a function that runs contests.
"""

from __future__ import annotations

import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ckptstore.format.changes import Claim, Commit
from ckptstore.format.entry import CheckpointEntry
from ckptstore.log import Log
from ckptstore.log.identity import read_or_create_identity
from ckptstore.storage.open import open_storage
from ckptstore.testing import RanksFailed, run_ranks
from ckptstore.tools.bench.destination import Place, opened_place
from ckptstore.tools.bench.figures.report import OURS, S3_TEST, Workload, WorkloadOutcome
from ckptstore.tools.bench.figures.text import absent
from ckptstore.tools.bench.peers import tier
from ckptstore.tools.bench.peers.registry import TABLES
from ckptstore.tools.bench.simulated import NUM_TENSORS, commit_of, commit_of_sharded
from ckptstore.tools.bench.work import Contests, Task

_LARGE_FILES = 4
_SMALL_BYTES = 10 << 10


@contextmanager
def with_files(task: Task, num_files: int | None = None) -> Iterator[tuple[Task, dict[str, Any]]]:
    """Yield the task with the files that its workload saves, if it saves some, and the facts of them.

    There are directories of each rank, or for "node-cache" one for all. They have large files or, for the shape
    "files", many of 10 KiB, or `num_files` in all.
    """
    if task.name not in ("directory", "node-cache"):
        yield task, {}
        return
    shares = 1 if task.name == "node-cache" else task.options.ranks
    if num_files is None:
        is_small = task.options.shape == "files"
        num_files = max(1, task.size_bytes // _SMALL_BYTES) if is_small else _LARGE_FILES * shares
    each = max(1, num_files // shares)
    file_bytes = max(1, task.size_bytes // (each * shares))
    above = task.place.path if task.place.is_local else None
    with tempfile.TemporaryDirectory(prefix="ckptstore-bench-files-", dir=above) as directory:
        pattern = os.urandom(min(1 << 20, file_bytes))
        for rank in range(shares):
            target = Path(directory) / "source" / (f"rank-{rank}" if task.name == "directory" else "")
            for number in range(each):
                path = target / f"d{number // 1000}" / f"shard-{rank}-{number}.bin"
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("wb") as file:
                    for start in range(0, file_bytes, len(pattern)):
                        file.write(pattern[: file_bytes - start])
        os.sync()
        yield replace(task, files=f"{directory}/source"), {"files": each * shares, "file_bytes": file_bytes}


_NUM_LOCAL = (1, 100, 1000)
_NUM_REMOTE = (1, 10, 100)


def finding(task: Task, contests: Contests) -> Iterator[Workload]:
    """Measure one workload for each size of a store. The limit is one listing of the log, which reads no record."""
    tasks = []
    for number in _NUM_LOCAL if task.place.is_local else _NUM_REMOTE:
        place = replace(task.place, uri=f"{task.place.uri}/log-of-{number}")
        fill(place, number)
        options = replace(task.options, pause_seconds=0.0)  # nothing is stored between the turns
        tasks.append(replace(task, options=options, place=place, num_checkpoints=number))
    for one, found in zip(tasks, contests(tasks, 1), strict=True):
        title = f"latest() and a listing of {one.num_checkpoints} checkpoints"
        yield replace(found, title=title, size_bytes=0, facts={"checkpoints": one.num_checkpoints})


def fill(place: Place, num_checkpoints: int) -> None:
    """Create a store whose log has so many checkpoints, without their files."""
    storage = open_storage(place.uri, storage_options=place.storage_options, durable=False)
    try:
        read_or_create_identity(storage)
        log = Log(storage)
        log.append(lambda _: Claim(start_token="bench", world_size=8))
        for step in range(num_checkpoints):
            entry = CheckpointEntry(
                step=step,
                epoch=1,
                attempt=f"step-{step:010d}-e0001-0123abcd",
                manifest_sha256="0" * 64,
                kind="state",
                world_size=8,
                size_bytes=10**9,
                num_files=16,
                created_at=time.time(),
                metrics={"loss": 1.0 / (1 + step)},
                save_number=step + 1,
            )
            log.append(lambda _, entry=entry: Commit(entry=entry))  # type: ignore[misc]
    finally:
        storage.close()


BYTES_PER_SECOND, LATENCY_SECONDS = 200e6, 0.03
"""The default line to the bucket."""
_STEPS_BYTES = 256 << 20
"""The most bytes drained beside the steps: the drain lasts longer than they do, whatever its size."""
_MEMCPY, _LOOPBACK, _DISK, _BOTH = "memcpy", "loopback", "raw disk", "raw disk, both copies"
_FROM_BUCKET = "from the bucket"
"""The only source of a peer when the disk of a node is lost."""


@dataclass(frozen=True, slots=True)
class _View:
    """A part of a contest as a workload of its own: the contender called ckptstore in it, and the others."""

    name: str
    title: str
    ours: Any
    beside: Sequence[Any]
    """Names, and contenders."""
    peers: str | None = ""
    """The suffix of its peers' names: "" for all of them, None for none."""
    figure: str = "total_seconds"


_SAVES = (
    _View(
        "tier-complete",
        "Fast checkpoint complete, one copy",
        tier.OneCopy,
        (tier.TwoCopies, tier.ToDisk, tier.NoTier, _DISK),
    ),
    _View(
        "tier-copies",
        "Fast checkpoint complete, two copies",
        tier.TwoCopies,
        (tier.OneCopy, _DISK, _BOTH, _LOOPBACK),
        peers=None,  # none of them has a second copy
    ),
    _View(
        "tier-stall",
        "Stall of an asynchronous save with a fast tier",
        tier.OneCopy,
        (tier.TwoCopies, tier.NoTier, _MEMCPY),
        figure="blocked_seconds",
    ),
)
_RESUMES = (
    _View(
        "tier-resume",
        "Resume from the disk of the own node",
        tier.FromOwnNode,
        (tier.FromPartner, tier.FromEmptyNodes, tier.FromDisk, tier.FromBucket, _DISK),
    ),
    _View(
        "tier-resume-partner",
        "Resume of a node whose disk is empty, from its partner",
        tier.FromPartner,
        (tier.FromOwnNode, tier.FromDisk, tier.FromBucket),
        peers=_FROM_BUCKET,
    ),
    _View(
        "tier-resume-bucket",
        "Resume of nodes whose disks are empty, from the bucket",
        tier.FromEmptyNodes,
        (tier.FromBucket,),
        peers=_FROM_BUCKET,
    ),
)
_STEPS = (_View("tier-steps", "Steps beside a capped drain", tier.CappedDrain, (tier.NoDrain,)),)
_VIEWS: Mapping[str, Sequence[_View]] = {"tier-save": _SAVES, "tier-resume": _RESUMES, "tier-steps": _STEPS}

_LINES = ("", "-full-speed")
VIEW_NAMES = frozenset(view.name + line for views in _VIEWS.values() for view in views for line in _LINES)
"""The names of all workloads that `fast_nodes` yields."""


def fast_nodes(task: Task, contests: Contests) -> Iterator[Workload]:
    """Run every contest behind both lines. Only ratios of one line are comparable; names of the second say so."""
    speed, seconds = task.options.bytes_per_second, task.options.latency_seconds
    slow = (BYTES_PER_SECOND if speed is None else speed, LATENCY_SECONDS if seconds is None else seconds)
    lines = dict[str, tuple[float | None, float]](zip(_LINES, (slow, (None, 0.0)), strict=True))
    tasks: dict[tuple[str, str], Task] = {}
    with ExitStack() as open_buckets:
        for suffix, (bytes_per_second, latency_seconds) in lines.items():
            opened = opened_place(S3_TEST, {}, bytes_per_second=bytes_per_second, latency_seconds=latency_seconds)
            bucket = open_buckets.enter_context(opened)
            for name in _VIEWS:
                place = replace(task.place, uri=f"{task.place.uri}/{name}{suffix}")
                place.path.mkdir()
                size_bytes = min(task.size_bytes, _STEPS_BYTES) if name == "tier-steps" else task.size_bytes
                tasks[name, suffix] = replace(task, name=name, place=place, bucket=bucket, size_bytes=size_bytes)
        found = contests(list(tasks.values()), task.options.ranks * tier.NUM_NODES)
    for (name, suffix), workload in zip(tasks, found, strict=True):
        for view in _VIEWS[name]:
            yield _seen(workload, view, suffix, *lines[suffix])


def _seen(found: Workload, view: _View, suffix: str, bytes_per_second: float | None, seconds: float) -> Workload:
    """Return the part of a contest that the view shows, with the facts of the line to the bucket."""
    line_text = "the bucket answers at full speed"
    if bytes_per_second is not None:
        line_text = f"the line to the bucket has {bytes_per_second / 1e6:g} MB/s and {seconds * 1000:g} ms"
    facts: dict[str, Any] = {"nodes": tier.NUM_NODES, "line": line_text}
    ours = found.measured(view.ours.name)
    if view.name in ("tier-complete", "tier-copies") and ours is not None:
        facts["requests to the bucket before it was complete"] = max(one.requests or 0 for one in ours.samples)
    if view.name == "tier-steps" and ours is not None:  # all of it: the steps went on when the drain was over
        most_bytes = max(one.sent_bytes or 0 for one in ours.samples)
        facts["share of the drain in requests that ended beside the steps"] = round(most_bytes / found.size_bytes, 2)
    beside = {getattr(one, "name", one) for one in view.beside}
    outcomes = [replace(one, name=OURS) for one in found.outcomes if one.name == view.ours.name]
    outcomes += [
        replace(one, name="ckptstore, one copy" if one.name == OURS else one.name)
        for one in found.outcomes
        if one.name in beside or (one.role == "peer" and view.peers is not None and one.name.endswith(view.peers))
    ]
    name = view.name + suffix
    return replace(found, name=name, title=view.title, figure=view.figure, facts=facts, outcomes=tuple(outcomes))


GPU_TABLES = tuple(name for name in TABLES if name.startswith("gpu-"))


def on_device(task: Task, contests: Contests) -> Iterator[Workload]:
    """Run every contest by 1 rank, by 2, and by the requested number, if there are as many GPUs."""
    for ranks in sorted({1, 2, task.options.ranks}):
        suffix = "" if ranks == 1 else f"-{ranks}-ranks"
        if task.options.device == "cuda" and ranks > (count := torch.cuda.device_count()):
            reason = f"each rank needs a GPU of its own, and there are {count}"
            left_out = WorkloadOutcome(name=OURS, family=OURS, role="ckptstore", status="skipped", reason=reason)
            title = f"All of it by {ranks} ranks with NCCL"
            yield Workload(name=f"gpu{suffix}", title=title, size_bytes=0, ranks=ranks, outcomes=(left_out,))
            continue
        for name in GPU_TABLES:
            place = replace(task.place, uri=f"{task.place.uri}/{name}-{ranks}")
            if place.is_local:
                place.path.mkdir()
            (found,) = contests([replace(task, name=name, place=place)], ranks)
            place.remove(place.uri)
            yield replace(found, name=f"{name}{suffix}")


REAL_RANKS = (1, 2, 4, 8)
SIMULATED_RANKS = (64, 256, 1024, 4096, 16_384)
_SIZES = (16, 4, 1)
"""Divisors of the whole size."""
_FILE_COUNTS = (10, 100, 1000)
_FILES_BYTES = 256 << 20
_TIMEOUT_SECONDS = 1800.0
_SHOWN_CHARACTERS = 500
_LATENCY_SECONDS = 0.005
SIMULATIONS: Mapping[str, tuple[str, Callable[..., dict[str, Any]], Sequence[str]]] = {
    "simulated": ("commit", commit_of, ("seconds", "requests", "cpu_seconds", "peak_bytes")),
    "sharded": (
        "fully sharded state",
        commit_of_sharded,
        ("seconds", "cpu_seconds", "peak_bytes", "told_bytes", "agree_bytes", "outline_bytes"),
    ),
}
"""Commits of a real leader with many simulated ranks: of a directory, on a local disk whose latency is injected, and of
a state of many tensors, each divided over all ranks, without latency. Each has the figures whose laws are fitted."""

Show = Callable[[str, int, int], None]


def scaling(task: Task, contests: Contests, show: Show) -> dict[str, Any]:
    """Return curves of real processes, and of simulated ranks with the law of their growth."""
    options = task.options
    ranks = [_point(count, task, contests, count) for count in REAL_RANKS if count <= max(8, options.ranks)]
    sizes = []
    for part in _SIZES:
        size_bytes = max(1 << 20, task.size_bytes // part)
        sizes.append(_point(size_bytes, replace(task, size_bytes=size_bytes), contests, options.ranks))
    files, some = [], replace(task, name="directory", size_bytes=min(task.size_bytes, _FILES_BYTES))
    for count in _FILE_COUNTS:  # the same bytes in more and more files
        with with_files(some, count) as (ready, facts):
            files.append(_point(facts["files"], ready, contests, options.ranks))
    latency_seconds = _LATENCY_SECONDS if options.latency_seconds is None else options.latency_seconds
    return {
        "real": {"ranks": ranks, "bytes": sizes, "files": files},
        "simulated": simulate("simulated", task.place, options.max_ranks, show, latency_seconds=latency_seconds),
        "sharded": simulate("sharded", task.place, options.max_ranks, show, tensors=NUM_TENSORS),
    }


def _point(at: int, task: Task, contests: Contests, ranks: int) -> dict[str, Any]:
    """Return median and samples of the seconds of each measured contender at a point; and the absent ones."""
    (found,) = contests([task], ranks)
    seconds = {one.name: {"median": found.median(one), "samples": found.figures(one)} for one in found.all_measured()}
    return {"at": at, "size_bytes": found.size_bytes, "seconds": seconds, "absent": absent(found)}


def simulate(kind: str, place: Place, max_ranks: int, show: Show, **setting: float) -> dict[str, Any]:
    """Return the setting, measurements for more and more ranks, each in a process of its own, and the laws that fit.

    Where one fails, its reason stands for all of more ranks.
    """
    what, commit, figures = SIMULATIONS[kind]
    above = place.path if place.is_local else None
    points: list[dict[str, Any]] = []
    failed: list[str] = []
    for count in SIMULATED_RANKS:
        if count > max_ranks or failed:
            break
        show(f"ranks: {what} of {count} simulated ranks", len(points), len(SIMULATED_RANKS))
        with tempfile.TemporaryDirectory(prefix="ckptstore-bench-ranks-", dir=above) as name:
            try:
                points += run_ranks(
                    1, commit, f"{name}/run", count, *setting.values(), timeout_seconds=_TIMEOUT_SECONDS
                )
            except RanksFailed as error:
                failed = [f"failed: {what} of {count} simulated ranks: {str(error)[:_SHOWN_CHARACTERS]}"]
    return {**setting, "points": points, "absent": failed, "laws": laws(points, figures)}


def laws(points: Sequence[Mapping[str, Any]], figures: Sequence[str]) -> dict[str, Any]:
    """For each figure return the fitted line, and the power of the ranks by which it grows between the two largest."""
    found: dict[str, Any] = {}
    numbers = [float(point["ranks"]) for point in points]
    for name in figures if len(points) > 1 else ():
        values = [point[name] for point in points]
        if None in values:
            continue
        base, slope, error = line(numbers, values)
        found[name] = {
            "base": base,
            "slope": slope,
            "error": round(error, 4),
            "exponent": round(exponent(numbers, values), 3),
            "text": f"{base:.4g} + {slope:.4g} n (within {error:.0%})",
        }
    return found


def line(numbers: Sequence[float], values: Sequence[float]) -> tuple[float, float, float]:
    """Return base, slope and largest relative error of the line with the smallest relative errors, so that small sizes
    count as much as large ones.

    Raises ValueError for fewer than two different numbers.
    """
    if len({*numbers}) < 2:
        raise ValueError("a line takes two different numbers")
    weights = [1.0 / max(1e-12, value) for value in values]
    slope, base = map(float, np.polyfit(numbers, values, 1, w=weights))
    return base, slope, max(abs(base + slope * n - v) * w for n, v, w in zip(numbers, values, weights, strict=True))


def exponent(numbers: Sequence[float], values: Sequence[float]) -> float:
    """Return the power of n by which values grow between the last two numbers: 1 is linear, 2 quadratic."""
    before, after = (max(1e-12, value) for value in values[-2:])
    return math.log(after / before) / math.log(numbers[-1] / numbers[-2])
