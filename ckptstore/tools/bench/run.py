"""A whole run: every workload in processes of its own, one report."""

from __future__ import annotations

import json
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, replace
from io import StringIO
from pathlib import Path
from typing import Any

from ckptstore.errors import InvalidInput
from ckptstore.testing import RanksFailed, run_ranks
from ckptstore.tools.bench import machine
from ckptstore.tools.bench.case import Case
from ckptstore.tools.bench.destination import Place, check_room, is_disk, opened_place
from ckptstore.tools.bench.figures.report import (
    OURS,
    S3_SINK,
    S3_TEST,
    Asked,
    Report,
    Sample,
    Workload,
    WorkloadOutcome,
)
from ckptstore.tools.bench.gpu.on_device import check_device, on_device
from ckptstore.tools.bench.peers.base import installed_versions
from ckptstore.tools.bench.peers.registry import CONTENDERS
from ckptstore.tools.bench.shapes import asked_bytes
from ckptstore.tools.bench.timeline import aligned, straggler
from ckptstore.tools.bench.work import LOADS, Task, figure_of, work
from ckptstore.tools.bench.workloads.fast_nodes import fast_nodes
from ckptstore.tools.bench.workloads.files import files_of
from ckptstore.tools.bench.workloads.finding import finding
from ckptstore.tools.bench.workloads.scaling import scaling

_TIMEOUT_SECONDS = 3600.0
_STATES_ON_DISK = {
    "save": 2,
    "load": 1,
    "async": 4,
    "directory": 3,
    "node-cache": 3,
    "tier": 4,
    "ranks": 2,
    "ls": 0,
    "gpu": 4,
}
_STATES_IN_MEMORY = {
    "save": 6,
    "load": 6,
    "async": 12,
    "directory": 2,
    "node-cache": 1,
    "tier": 16,
    "ranks": 4,
    "ls": 0,
    "gpu": 12,
}
"""At the most, as multiples of the size; on the disk also what each peer keeps that loads."""
_TITLES = {
    "save": "Save a state",
    "load": "Load into tensors that exist",
    "async": "Stall of an asynchronous save",
    "directory": "Save a directory of files",
    "node-cache": "All processes of a node open one checkpoint",
}

Show = Callable[[str, int, int], None]
"""Called with what is done now, how many turns are over, and how many there are."""


def run(asked: Asked, *, storage_options: Mapping[str, Any], command: str, show: Show) -> Report:
    """Measure everything that is asked for. Raises StorageFull before anything is written when it would not fit."""
    _check(asked)
    size_bytes = asked_bytes(asked.shape, size_bytes=asked.size_bytes, scale=asked.scale)
    started = time.time()
    line = {"latency_seconds": asked.latency_seconds or 0.0, "bytes_per_second": asked.bytes_per_second}
    with opened_place(asked.to, storage_options, **line) as place:  # type: ignore[arg-type]
        check_room(
            place,
            disk_bytes=size_bytes * max(_states_on_disk(name, asked, place) for name in asked.workloads),
            memory_bytes=size_bytes * max(_STATES_IN_MEMORY[name] for name in asked.workloads),
        )
        workloads: list[Workload] = []
        curves: Mapping[str, Any] = {}
        for name in asked.workloads:
            if name == "ls":
                workloads += finding(place, asked, tell=lambda text: show(f"ls: {text}", 0, 0))
            elif name == "tier":
                workloads += fast_nodes(place, asked, size_bytes, lambda tasks, ranks: contests(tasks, ranks, show))
            elif name == "gpu":
                workloads += on_device(place, asked, size_bytes, lambda tasks, ranks: contests(tasks, ranks, show))
            elif name == "ranks":
                curves = scaling(place, asked, size_bytes, lambda task, ranks: contest(task, ranks, show), show)
            else:
                workloads.append(_workload(name, asked, place, size_bytes, show))
        told = machine.describe(place)
        if asked.device == "cuda":
            told |= machine.gpus()
    kinds = [
        kind
        for contest_name, found in CONTENDERS.items()
        if any(contest_name == name or contest_name.startswith(f"{name}-") for name in asked.workloads)
        for kind in found
    ]
    return Report(
        created_at=started,
        command=command,
        machine=told,
        versions={**machine.versions(), **installed_versions(kinds)},
        asked={**asdict(replace(asked, to=None)), "size_bytes": size_bytes},
        workloads=tuple(workloads),
        scaling=curves,
    )


def _check(asked: Asked) -> None:
    """Raise InvalidInput for what could not be done, and for what would have no effect."""
    unread = sorted({*asked.workloads} & {"load", "node-cache"}) if asked.to == S3_SINK else []
    if unread:
        raise InvalidInput(f"{S3_SINK} keeps nothing that {' and '.join(unread)} could read", hint=f"Take {S3_TEST}")
    if asked.tensor_bytes is not None:
        if asked.shape != "tensors":
            raise InvalidInput(f"--tensor-size has no effect on the shape {asked.shape}", hint="Give --shape tensors")
        if asked.tensor_bytes < 1:
            raise InvalidInput("--tensor-size is 0, a tensor has at least 1 byte")
    if "tier" in asked.workloads and not is_disk(asked.to):
        raise InvalidInput(f"{asked.to} is no disk, and a fast tier lies on one", hint="Give --to a directory")
    if asked.device is not None:
        if "gpu" not in asked.workloads:
            raise InvalidInput("--device has no effect here", hint="It is for the workload gpu")
        check_device(asked.device)
    with_line = asked.to in (S3_TEST, S3_SINK) or "tier" in asked.workloads
    if asked.latency_seconds is not None and not with_line and "ranks" not in asked.workloads:
        raise InvalidInput(
            "--latency-ms has no effect here: no test server and no simulated rank takes part",
            hint=f"Give --to {S3_TEST}, or measure ranks",
        )
    if asked.bytes_per_second is not None and not with_line:
        raise InvalidInput(
            "--bandwidth-mb has no effect here: no test server takes part", hint=f"Give --to {S3_TEST}, or measure tier"
        )


def _states_on_disk(name: str, asked: Asked, place: Place) -> int:
    """What is there at the same time. All that take part in a load have a checkpoint of their own."""
    found = _STATES_ON_DISK[name]
    for contest_name in (name, {"tier": "tier-resume", "gpu": "gpu-load"}.get(name, "")):
        if contest_name in LOADS:
            case = Case(place=place, rank=0, world_size=asked.ranks, durable=asked.durable, bucket=place)
            kinds = [kind for kind in CONTENDERS[contest_name] if kind.role != "peer" or asked.wants(kind.family)]
            found += sum(kind.unfit(case) is None for kind in kinds)
    return found


def _workload(name: str, asked: Asked, place: Place, size_bytes: int, show: Show) -> Workload:
    task = Task(name=name, asked=asked, place=place, size_bytes=size_bytes)
    if name in ("directory", "node-cache"):
        with files_of(asked, name, size_bytes, place) as (files, facts):
            return replace(contest(replace(task, files=str(files)), asked.ranks, show), facts=facts)
    return contest(task, asked.ranks, show)


def contest(task: Task, ranks: int, show: Show) -> Workload:
    """One workload by real processes. Never raises for what a rank does: it is told as every contender's failure."""
    return contests([task], ranks, show)[0]


def contests(tasks: Sequence[Task], ranks: int, show: Show) -> list[Workload]:
    """The same for several workloads by the same processes, one after another."""
    with tempfile.TemporaryDirectory(prefix="ckptstore-bench-") as name, _told(Path(name), tasks[0].name, show) as told:
        tasks = [replace(task, told=str(told)) for task in tasks]
        try:
            with redirect_stdout(StringIO()):  # what peers print; of a failure it is in the error
                found = run_ranks(ranks, work, tasks, timeout_seconds=_TIMEOUT_SECONDS, env=_env(tasks[0]))
        except RanksFailed as error:
            return [_failed(task, ranks, str(error)) for task in tasks]
    return [join(task, [rank[number] for rank in found]) for number, task in enumerate(tasks)]


def join(task: Task, found: Sequence[Mapping[str, Any]]) -> Workload:
    """One workload from what all ranks returned."""
    outcomes = [_joined([rank["outcomes"][index] for rank in found]) for index in range(len(found[0]["outcomes"]))]
    watched = [rank["watched"] for rank in found if rank["watched"]]
    facts: dict[str, Any] = {}
    timeline = aligned([one["phases"] for one in watched])
    if watched:
        calls: dict[str, int] = {}
        for one in watched:
            for verb, count in one["calls"].items():
                calls[verb] = calls.get(verb, 0) + count
        outcomes = [replace(one, calls=calls) if one.name == OURS else one for one in outcomes]
        late = straggler(timeline)
        facts["straggler"] = {"rank": late[0], "seconds": round(late[1], 6)} if late else None
    return Workload(
        name=task.name,
        title=_TITLES.get(task.name, task.name),
        size_bytes=found[0]["rank_bytes"] if task.name == "node-cache" else sum(rank["rank_bytes"] for rank in found),
        ranks=len(found),
        figure=figure_of(task.name),
        facts=facts,
        timeline=tuple(timeline),
        outcomes=tuple(outcomes),
    )


def _joined(of_ranks: Sequence[WorkloadOutcome]) -> WorkloadOutcome:
    turns = zip(*(one.samples for one in of_ranks), strict=True)
    return replace(of_ranks[0], samples=tuple(Sample.over_ranks(turn) for turn in turns))


def _failed(task: Task, ranks: int, reason: str) -> Workload:
    outcomes = [
        WorkloadOutcome(name=kind.name, family=kind.family, role=kind.role, status="failed", reason=reason[:2000])
        for kind in CONTENDERS[task.name]
        if kind.role != "peer" or task.asked.wants(kind.family)
    ]
    title = _TITLES.get(task.name, task.name)
    return Workload(name=task.name, title=title, size_bytes=task.size_bytes, ranks=ranks, outcomes=tuple(outcomes))


def _env(task: Task) -> dict[str, str]:
    """What clients that take no credentials find in their environment: those of the test server only."""
    if (task.bucket or task.place).endpoint_url is None:
        return {}
    return {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "testsecret", "AWS_REGION": "us-east-1"}


@contextmanager
def _told(directory: Path, workload: str, show: Show) -> Iterator[Path]:
    """A file whose lines are shown as they come."""
    path, over = directory / "told", threading.Event()
    path.touch()

    def follow() -> None:
        count = 0
        with path.open() as file:
            while not over.wait(0.1):
                for line in file:
                    told = json.loads(line)
                    show(f"{workload}: {told['turn']}", count, told["total"])
                    count += 1

    thread = threading.Thread(target=follow, name="ckptstore-bench-progress", daemon=True)
    thread.start()
    try:
        yield path
    finally:
        over.set()
        thread.join()
