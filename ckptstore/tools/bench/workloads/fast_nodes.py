"""A fast tier on two simulated nodes: saves, resumes and steps, with a slow line to the bucket and at full speed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from ckptstore.tools.bench.destination import Place, opened_place
from ckptstore.tools.bench.figures.report import OURS, S3_TEST, Options, Workload
from ckptstore.tools.bench.peers.tier import (
    NUM_NODES,
    FromBucket,
    FromDisk,
    FromEmptyNodes,
    FromOwnNode,
    FromPartner,
    NoTier,
    OneCopy,
    ToDisk,
    TwoCopies,
)
from ckptstore.tools.bench.work import Task

BYTES_PER_SECOND, LATENCY_SECONDS = 200e6, 0.03
"""The default line to the bucket."""
_STEPS_BYTES = 256 << 20
"""The most bytes drained beside the steps: the drain lasts longer than they do, whatever its size."""
_MEMCPY, _LOOPBACK, _DISK, _BOTH = "memcpy", "loopback", "raw disk", "raw disk, both copies"

_FROM_BUCKET = "from the bucket"
"""The only source of a peer when the disk of a node is lost."""

Contests = Callable[[Sequence[Task], int], list[Workload]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _View:
    """A part of a contest as a workload of its own: the contender called ckptstore in it, and the others."""

    name: str
    title: str
    ours: str
    beside: Sequence[str]
    peers: str | None = ""
    """The suffix of its peers' names: "" for all of them, None for none."""
    figure: str = "total_seconds"


_VIEWS: Mapping[str, Sequence[_View]] = {
    "tier-save": (
        _View(
            name="tier-complete",
            title="Fast checkpoint complete, one copy",
            ours=OneCopy.name,
            beside=(TwoCopies.name, ToDisk.name, NoTier.name, _DISK),
        ),
        _View(
            name="tier-copies",
            title="Fast checkpoint complete, two copies",
            ours=TwoCopies.name,
            beside=(OneCopy.name, _DISK, _BOTH, _LOOPBACK),
            peers=None,  # none of them has a second copy
        ),
        _View(
            name="tier-stall",
            title="Stall of an asynchronous save with a fast tier",
            ours=OneCopy.name,
            beside=(TwoCopies.name, NoTier.name, _MEMCPY),
            figure="blocked_seconds",
        ),
    ),
    "tier-resume": (
        _View(
            name="tier-resume",
            title="Resume from the disk of the own node",
            ours=FromOwnNode.name,
            beside=(FromPartner.name, FromEmptyNodes.name, FromDisk.name, FromBucket.name, _DISK),
        ),
        _View(
            name="tier-resume-partner",
            title="Resume of a node whose disk is empty, from its partner",
            ours=FromPartner.name,
            beside=(FromOwnNode.name, FromDisk.name, FromBucket.name),
            peers=_FROM_BUCKET,
        ),
        _View(
            name="tier-resume-bucket",
            title="Resume of nodes whose disks are empty, from the bucket",
            ours=FromEmptyNodes.name,
            beside=(FromBucket.name,),
            peers=_FROM_BUCKET,
        ),
    ),
    "tier-steps": (_View(name="tier-steps", title="Steps beside a capped drain", ours=OURS, beside=("no drain",)),),
}

_LINES = ("", "-full-speed")
VIEW_NAMES = frozenset(view.name + line for views in _VIEWS.values() for view in views for line in _LINES)
"""The names of all workloads that `fast_nodes` yields."""


def fast_nodes(place: Place, options: Options, size_bytes: int, contests: Contests) -> Iterator[Workload]:
    """Run every contest behind both lines. Only ratios of one line are comparable; names of the second say so."""
    speed = BYTES_PER_SECOND if options.bytes_per_second is None else options.bytes_per_second
    latency_seconds = LATENCY_SECONDS if options.latency_seconds is None else options.latency_seconds
    lines = dict[str, tuple[float | None, float]](zip(_LINES, ((speed, latency_seconds), (None, 0.0)), strict=True))
    tasks: dict[tuple[str, str], Task] = {}
    with ExitStack() as open_buckets:
        for suffix, (bytes_per_second, seconds) in lines.items():
            bucket = opened_place(S3_TEST, {}, bytes_per_second=bytes_per_second, latency_seconds=seconds)
            task = Task(
                name="", options=options, place=place, size_bytes=size_bytes, bucket=open_buckets.enter_context(bucket)
            )
            for name in _VIEWS:
                own = replace(place, uri=f"{place.uri}/{name}{suffix}")
                own.path.mkdir()
                largest = _STEPS_BYTES if name == "tier-steps" else size_bytes
                tasks[name, suffix] = replace(task, name=name, place=own, size_bytes=min(size_bytes, largest))
        found = contests(list(tasks.values()), options.ranks * NUM_NODES)
    for (name, suffix), workload in zip(tasks, found, strict=True):
        for view in _VIEWS[name]:
            yield _seen(workload, view, suffix, _facts(view, workload, *lines[suffix]))


def _facts(view: _View, found: Workload, bytes_per_second: float | None, latency_seconds: float) -> dict[str, Any]:
    line = "the bucket answers at full speed"
    if bytes_per_second is not None:
        line = f"the line to the bucket has {bytes_per_second / 1e6:g} MB/s and {latency_seconds * 1000:g} ms"
    facts: dict[str, Any] = {"nodes": NUM_NODES, "line": line}
    ours = found.measured(view.ours)
    if view.name in ("tier-complete", "tier-copies") and ours is not None:
        facts["requests to the bucket before it was complete"] = max(one.requests or 0 for one in ours.samples)
    if view.name == "tier-steps" and ours is not None:  # all of it: the steps went on when the drain was over
        most_bytes = max(one.sent_bytes or 0 for one in ours.samples)
        facts["share of the drain in requests that ended beside the steps"] = round(most_bytes / found.size_bytes, 2)
    return facts


def _seen(found: Workload, view: _View, suffix: str, facts: Mapping[str, Any]) -> Workload:
    """Return the part of a contest that the view shows."""
    by_name = {one.name: one for one in found.outcomes}
    outcomes = [replace(by_name[view.ours], name=OURS)]
    outcomes += [
        replace(one, name="ckptstore, one copy" if one.name == OURS else one.name)
        for one in found.outcomes
        if one.name in view.beside or (one.role == "peer" and view.peers is not None and one.name.endswith(view.peers))
    ]
    name = view.name + suffix
    return replace(found, name=name, title=view.title, figure=view.figure, facts=facts, outcomes=tuple(outcomes))
