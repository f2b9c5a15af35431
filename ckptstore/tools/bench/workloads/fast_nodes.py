"""A fast tier on two simulated nodes: saves, resumes and steps, with a slow line to the bucket and at full speed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from ckptstore.tools.bench.destination import opened_place
from ckptstore.tools.bench.figures.report import OURS, S3_TEST, Workload
from ckptstore.tools.bench.peers import tier
from ckptstore.tools.bench.work import Contests, Task

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
            yield _seen(workload, view, suffix, _facts(view, workload, *lines[suffix]))


def _facts(view: _View, found: Workload, bytes_per_second: float | None, latency_seconds: float) -> dict[str, Any]:
    line = "the bucket answers at full speed"
    if bytes_per_second is not None:
        line = f"the line to the bucket has {bytes_per_second / 1e6:g} MB/s and {latency_seconds * 1000:g} ms"
    facts: dict[str, Any] = {"nodes": tier.NUM_NODES, "line": line}
    ours = found.measured(view.ours.name)
    if view.name in ("tier-complete", "tier-copies") and ours is not None:
        facts["requests to the bucket before it was complete"] = max(one.requests or 0 for one in ours.samples)
    if view.name == "tier-steps" and ours is not None:  # all of it: the steps went on when the drain was over
        most_bytes = max(one.sent_bytes or 0 for one in ours.samples)
        facts["share of the drain in requests that ended beside the steps"] = round(most_bytes / found.size_bytes, 2)
    return facts


def _seen(found: Workload, view: _View, suffix: str, facts: Mapping[str, Any]) -> Workload:
    """Return the part of a contest that the view shows."""
    beside = {getattr(one, "name", one) for one in view.beside}
    outcomes = [replace(one, name=OURS) for one in found.outcomes if one.name == view.ours.name]
    outcomes += [
        replace(one, name="ckptstore, one copy" if one.name == OURS else one.name)
        for one in found.outcomes
        if one.name in beside or (one.role == "peer" and view.peers is not None and one.name.endswith(view.peers))
    ]
    name = view.name + suffix
    return replace(found, name=name, title=view.title, figure=view.figure, facts=facts, outcomes=tuple(outcomes))
