"""Work of the process of each rank."""

from __future__ import annotations

import json
import os
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptstore.events import listening
from ckptstore.store import CheckpointStore
from ckptstore.testing import with_faults
from ckptstore.testing.hooked import Call
from ckptstore.tools.bench.case import Case, process_group, use_threads
from ckptstore.tools.bench.destination import Place
from ckptstore.tools.bench.figures.report import Options, WorkloadOutcome
from ckptstore.tools.bench.gpu.steps import Steps
from ckptstore.tools.bench.peers.base import Contender
from ckptstore.tools.bench.peers.own import AsyncCkptstore, Ckptstore
from ckptstore.tools.bench.peers.registry import CONTENDERS
from ckptstore.tools.bench.shapes import TENSOR_BYTES
from ckptstore.tools.bench.timeline import Recorder
from ckptstore.tools.bench.turns import Contest, Tell

FIGURES = {"async": "blocked_seconds", "gpu-stall": "blocked_seconds", "gpu-first": "blocked_seconds"}
"""The figures for the ratios of workloads; total seconds for all others."""
LOADS = ("load", "node-cache", "tier-resume", "gpu-load")
"""The contests in which loads are timed."""
_CONTESTS: dict[str, type[Contest]] = {"gpu-steps": Steps}
"""The contests that time something else than one call."""
_WATCHED: dict[str, type[Ckptstore]] = {"save": Ckptstore, "async": AsyncCkptstore}
"""The workloads with a timeline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One workload, for all ranks."""

    name: str
    options: Options
    place: Place
    size_bytes: int
    bucket: Place | None = None
    """The bucket behind a fast tier."""
    files: str = ""
    """The directory to save: `rank-N` of it, or all of it in "node-cache"."""
    progress: str = ""
    """The file to which the first rank writes its progress, a line for each turn."""
    late_rank: int = -1
    late_seconds: float = 0.0
    """Delays each part that this rank writes in the timeline, to create a straggler."""


def figure_of(name: str) -> str:
    """Return the figure of a workload."""
    return FIGURES.get(name, "total_seconds")


def work(tasks: Sequence[Task]) -> list[dict[str, Any]]:
    """Take all turns of some workloads, one after another. Return this rank's outcomes for each, and its record of one
    save that was only watched.
    """
    warnings.simplefilter("ignore")
    with process_group(tasks[0].options.device or "cpu") as (rank, world_size):
        use_threads(world_size, os.cpu_count() or 1)
        found = []
        for task in tasks:
            case = case_of(task, rank, world_size)
            found.append(_turns(case, task))
            case.gather(None)
            if len(tasks) > 1 and rank == 0:  # the next one gets the same room
                for place in (case.place, *filter(None, [case.bucket])):
                    place.remove(place.uri)
        return found


def size_of(task: Task, rank_bytes: Sequence[int]) -> int:
    """Return the bytes that all ranks move; in "node-cache" they open the same ones."""
    return rank_bytes[0] if task.name == "node-cache" else sum(rank_bytes)


def action_of(name: str) -> str:
    """Return what is timed in a workload: "save" or "load"."""
    return "load" if name in LOADS else "save"


def contenders(name: str, options: Options) -> list[type[Contender]]:
    """Return those of a contest that the options want."""
    return [kind for kind in CONTENDERS[name] if kind.role != "peer" or options.wants(kind.family)]


def _turns(case: Case, task: Task) -> dict[str, Any]:
    tell = _teller(task, case.rank)
    contest = _CONTESTS.get(task.name, Contest)(case, action_of(task.name), figure=figure_of(task.name), tell=tell)
    outcomes: list[WorkloadOutcome] = contest.run(contenders(task.name, task.options), repeat=task.options.repeat)
    watched: dict[str, Any] = {}
    if task.name in _WATCHED and any(one.role == "ckptstore" and one.status == "measured" for one in outcomes):
        tell("timeline", 0)
        watched = watch(case, _WATCHED[task.name], task)
    return {"outcomes": outcomes, "watched": watched, "rank_bytes": case.rank_bytes}


def case_of(task: Task, rank: int, world_size: int) -> Case:
    """Create the case of one rank, with its tensors."""
    case = Case(
        place=task.place,
        rank=rank,
        world_size=world_size,
        durable=task.options.durable,
        drop_caches=task.options.drop_caches,
        pause_seconds=task.options.pause_seconds,
        device=f"cuda:{rank}" if task.options.device == "cuda" else "cpu",
        size_bytes=task.size_bytes,
        bucket=task.bucket,
    )
    if task.files:
        case.files = Path(task.files) / f"rank-{rank}" if task.name == "directory" else Path(task.files)
        case.rank_bytes = sum(path.stat().st_size for path in case.files.rglob("*") if path.is_file())
    elif task.name not in _CONTESTS:  # these create their own state
        case.make_state(task.options.shape, task.size_bytes, task.options.tensor_bytes or TENSOR_BYTES)
        if task.name in LOADS:
            case.make_target()
    return case


def _teller(task: Task, rank: int) -> Tell:
    def tell(text: str, total: int) -> None:
        if rank == 0 and task.progress:
            with open(task.progress, "a") as file:
                file.write(json.dumps({"turn": text, "total": total}) + "\n")

    return tell


def watch(case: Case, kind: type[Ckptstore], task: Task) -> dict[str, Any]:
    """Make one more save, recording every call; it is in no sample, for recording takes time."""
    recorder = Recorder(rank=case.rank)

    def hook(call: Call) -> None:
        recorder(call)
        if case.rank == task.late_rank and call.verb == "write_part" and call.phase == "before":
            time.sleep(task.late_seconds)

    def wrap(store: CheckpointStore) -> CheckpointStore:
        return with_faults(store, hook)

    contender: Contender = kind(case)
    contender.wrap = wrap  # type: ignore[attr-defined]
    place = case.uri("watched")
    contender.prepare(place)
    case.gather(None)
    with listening(recorder.on_event):
        recorder.started = time.monotonic()
        wait = contender.save(place)
        if wait is not None:
            wait()
        recorder.ended = time.monotonic()
    case.gather(None)
    found = {"calls": recorder.counts(), "phases": recorder.phases()}
    contender.after(place)
    contender.close()
    case.gather(None)
    if case.rank == 0:
        case.place.remove(place)
    return found
