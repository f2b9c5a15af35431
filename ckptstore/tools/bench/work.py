"""Work of the process of each rank."""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptstore.events import listening
from ckptstore.testing import with_faults
from ckptstore.testing.hooked import Call
from ckptstore.tools.bench.case import Case, process_group
from ckptstore.tools.bench.destination import Place
from ckptstore.tools.bench.figures.report import Options, Workload, WorkloadOutcome
from ckptstore.tools.bench.peers.base import Contender
from ckptstore.tools.bench.peers.own import Ckptstore
from ckptstore.tools.bench.peers.registry import TABLES, Table
from ckptstore.tools.bench.shapes import TENSOR_BYTES
from ckptstore.tools.bench.timeline import Recorder
from ckptstore.tools.bench.turns import Contest


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
    num_checkpoints: int = 0
    """The checkpoints of the store at the place, if contenders look for them."""
    progress: str = ""
    """The file to which the first rank writes its progress, a line for each turn."""
    late_rank: int = -1
    late_seconds: float = 0.0
    """Delays each part that this rank writes in the timeline, to create a straggler."""

    @property
    def table(self) -> Table:
        """Its contest."""
        return TABLES[self.name]

    def contenders(self) -> list[type[Contender]]:
        """Return the contenders that the options want."""
        return [kind for kind in self.table.contenders if kind.role != "peer" or self.options.wants(kind.family)]

    def moved_bytes(self, rank_bytes: Sequence[int]) -> int:
        """Return the bytes that all ranks move; in "node-cache" they open the same ones."""
        return rank_bytes[0] if self.name == "node-cache" else sum(rank_bytes)


Contests = Callable[[Sequence[Task], int], list[Workload]]
"""Runs several workloads by the same processes, as many as there are ranks, one after another."""


def work(tasks: Sequence[Task]) -> list[dict[str, Any]]:
    """Take all turns of some workloads, one after another. Return this rank's outcomes for each, and its record of one
    save that was only watched.
    """
    warnings.simplefilter("ignore")
    with process_group(tasks[0].options.device or "cpu") as (rank, world_size):
        found = []
        for task in tasks:
            case = case_of(task, rank, world_size)
            found.append(_turns(case, task))
            case.gather(None)
            if len(tasks) > 1 and rank == 0:  # the next one gets the same room
                for place in (case.place, *filter(None, [case.bucket])):
                    place.remove(place.uri)
        return found


def _turns(case: Case, task: Task) -> dict[str, Any]:
    def tell(text: str, total: int) -> None:
        if case.rank == 0 and task.progress:
            with open(task.progress, "a") as file:
                file.write(json.dumps({"turn": text, "total": total}) + "\n")

    contest = task.table.contest(case, task.table.action, figure=task.table.figure, tell=tell)
    outcomes: list[WorkloadOutcome] = contest.run(task.contenders(), repeat=task.options.repeat)
    watched: dict[str, Any] = {}
    if task.table.watched and any(one.role == "ckptstore" and one.status == "measured" for one in outcomes):
        tell("timeline", 0)
        watched = watch(case, task.table.watched, task)
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
        num_checkpoints=task.num_checkpoints,
    )
    if task.files:
        case.files = Path(task.files) / f"rank-{rank}" if task.name == "directory" else Path(task.files)
        case.rank_bytes = sum(path.stat().st_size for path in case.files.rglob("*") if path.is_file())
    elif task.table.contest is Contest and not task.num_checkpoints:  # others have states of their own, or none
        case.make_state(task.options.shape, task.size_bytes, task.options.tensor_bytes or TENSOR_BYTES)
        if task.table.action == "load":
            case.make_target()
    return case


def watch(case: Case, kind: type[Ckptstore], task: Task) -> dict[str, Any]:
    """Make one more save, recording every call; it is in no sample, for recording takes time."""
    recorder = Recorder(rank=case.rank)

    def hook(call: Call) -> None:
        recorder(call)
        if case.rank == task.late_rank and call.verb == "write_part" and call.phase == "before":
            time.sleep(task.late_seconds)

    contender = kind(case)
    contender.wrap = lambda store: with_faults(store, hook)
    place = case.uri("watched")
    contender.prepare(place)
    case.gather(None)
    with listening(recorder.on_event):
        recorder.started = time.monotonic()
        if wait := contender.save(place):
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
