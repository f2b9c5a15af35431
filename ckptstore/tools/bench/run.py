"""Run all workloads, in processes of their own, and return one report."""

from __future__ import annotations

import json
import re
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, replace
from io import StringIO
from pathlib import Path
from typing import Any, TypeVar

import torch

from ckptstore.errors import InvalidInput
from ckptstore.testing import RanksFailed, run_ranks
from ckptstore.tools.bench import machine
from ckptstore.tools.bench.case import Case
from ckptstore.tools.bench.claims import CLAIMS
from ckptstore.tools.bench.destination import Place, check_caches, check_room, is_disk, opened_place
from ckptstore.tools.bench.figures.report import OURS, S3_SERVERS, S3_TEST, Options, Report, Workload, WorkloadOutcome
from ckptstore.tools.bench.peers.registry import TABLES
from ckptstore.tools.bench.shapes import NUMBER_BYTES, state_bytes
from ckptstore.tools.bench.timeline import aligned, straggler
from ckptstore.tools.bench.work import Task, work
from ckptstore.tools.bench.workloads import GPU_TABLES, VIEW_NAMES, fast_nodes, finding, on_device, scaling, with_files

T = TypeVar("T")

_TIMEOUT_SECONDS = 3600.0
_STATES = {
    "save": (2, 6),
    "load": (1, 6),
    "async": (4, 12),
    "directory": (3, 2),
    "node-cache": (3, 1),
    "tier": (4, 16),
    "ranks": (2, 4),
    "ls": (0, 0),
    "gpu": (4, 12),
}
"""The most states at a time on the disk, and in memory, as multiples of the size; on the disk also the checkpoints of
each peer that loads."""
_OF_PARTS = {"ls": finding, "tier": fast_nodes, "gpu": on_device}
"""Those that consist of several contests."""

Show = Callable[[str, int, int], None]
"""Called with the present action, the number of finished turns, and their total."""


def run(options: Options, *, storage_options: Mapping[str, Any], command: str, show: Show) -> Report:
    """Measure everything that is requested. Raises StorageFull before anything is written when it would not fit."""

    def measured(tasks: Sequence[Task], ranks: int) -> list[Workload]:
        return contests(tasks, ranks, show)

    started = time.time()
    with opened(options, storage_options) as (place, size_bytes):
        workloads: list[Workload] = []
        curves: Mapping[str, Any] = {}
        for name in options.workloads:
            task = Task(name=name, options=options, place=place, size_bytes=size_bytes)
            if name in _OF_PARTS:
                workloads += _OF_PARTS[name](task, measured)
            elif name == "ranks":
                curves = scaling(task, measured, show)
            else:
                with with_files(task) as (ready, facts):
                    (found,) = measured([ready], options.ranks)
                    workloads.append(replace(found, facts={**found.facts, **facts}))
        described = machine.describe(place)
        if options.device == "cuda":
            described |= machine.gpus()
    kinds = [
        kind
        for contest_name, table in TABLES.items()
        if any(f"{contest_name}-".startswith(f"{name}-") for name in options.workloads)
        for kind in table.contenders
    ]
    return Report(
        created_at=started,
        command=command,
        machine=described,
        versions=machine.versions(package for kind in kinds for package in kind.packages),
        asked={**asdict(replace(options, to=None)), "size_bytes": size_bytes},
        workloads=tuple(workloads),
        scaling=curves,
    )


def has_ratios(name: str) -> bool:
    """True for the name of a workload that some run compares: "ranks" has curves, and others consist of parts."""
    known = {*_STATES, *VIEW_NAMES, *CLAIMS} - {"tier", "ranks", "gpu"}
    return name in known or re.fullmatch(rf"({'|'.join(GPU_TABLES)})(-\d+-ranks)?", name) is not None


@contextmanager
def opened(options: Options, storage_options: Mapping[str, Any]) -> Iterator[tuple[Place, int]]:
    """Yield the place of a run, and the bytes of its state. Raises StorageFull when it would not fit, InvalidInput."""
    _check(options)
    size_bytes = _checked_size(options)
    line = {"latency_seconds": options.latency_seconds or 0.0, "bytes_per_second": options.bytes_per_second}
    with opened_place(options.to, storage_options, **line) as place:  # type: ignore[arg-type]
        check_room(
            place,
            disk_bytes=size_bytes * max(_states_on_disk(name, options, place) for name in options.workloads),
            memory_bytes=size_bytes * max(_STATES[name][1] for name in options.workloads),
            temporary_bytes=size_bytes
            * (2 if {"directory", "node-cache"} & {*options.workloads} else int(options.wants("ray"))),
        )
        yield place, size_bytes


def _check(options: Options) -> None:
    """Raise InvalidInput for impossible options, and for options without effect."""
    workloads = {*options.workloads}
    unread = sorted(workloads & {"load", "node-cache"})
    if unread and options.to in S3_SERVERS and "sink" in options.to:
        reason = f"{options.to} keeps nothing that {' and '.join(unread)} could read"
        raise InvalidInput(reason, hint=f"Take {options.to.replace('sink', 'test')}")
    if options.pause_seconds and workloads == {"ls"}:
        raise InvalidInput("--pause-seconds has no effect on ls, which stores nothing")
    if options.drop_caches:
        if not workloads & {"load", "node-cache", "tier", "gpu"} or not is_disk(options.to):
            raise InvalidInput("--drop-caches has no effect here: nothing is loaded from a disk")
        check_caches()
    if "tier" in workloads and not is_disk(options.to):
        raise InvalidInput(f"{options.to} is no disk, and a fast tier lies on one", hint="Give --to a directory")
    if options.device is not None and "gpu" not in workloads:
        raise InvalidInput("--device has no effect here", hint="It is for the workload gpu")
    if options.device == "cuda" and not torch.cuda.is_available():  # which takes no memory of a GPU
        raise InvalidInput(
            f"torch {torch.__version__} finds no GPU here",
            hint="--device cpu rehearses the same with tensors of the CPU",
        )
    with_line = options.to in S3_SERVERS or "tier" in workloads
    if options.latency_seconds is not None and not with_line and "ranks" not in workloads:
        raise InvalidInput(
            "--latency-ms has no effect here: no test server and no simulated rank takes part",
            hint=f"Give --to {S3_TEST}, or measure ranks",
        )
    if options.bytes_per_second is not None and not with_line:
        raise InvalidInput(
            "--bandwidth-mb has no effect here: no test server takes part", hint=f"Give --to {S3_TEST}, or measure tier"
        )


def _checked_size(options: Options) -> int:
    """Return the bytes of the state. Raises InvalidInput for what no tensor or rank can have."""
    size_bytes = state_bytes(options.shape, size_bytes=options.size_bytes, scale=options.scale)
    if size_bytes < options.ranks * NUMBER_BYTES:
        raise InvalidInput(f"{size_bytes} bytes are too few: each of {options.ranks} ranks saves one number at least")
    if options.tensor_bytes is not None:
        if options.shape != "tensors":
            raise InvalidInput(f"--tensor-size has no effect on the shape {options.shape}", hint="Give --shape tensors")
        if options.tensor_bytes < NUMBER_BYTES:
            raise InvalidInput(f"--tensor-size is below {NUMBER_BYTES} bytes, which one number takes")
    return size_bytes


def _states_on_disk(name: str, options: Options, place: Place) -> int:
    """Return the most states on the disk at a time. All contenders of a load have a checkpoint of their own."""
    task = Task(
        name={"tier": "tier-resume", "gpu": "gpu-load"}.get(name, name), options=options, place=place, size_bytes=0
    )
    if task.table.action != "load":
        return _STATES[name][0]
    case = Case(place=place, rank=0, world_size=options.ranks, durable=options.durable, bucket=place)
    return _STATES[name][0] + sum(kind.unfit(case) is None for kind in task.contenders())


def contests(tasks: Sequence[Task], ranks: int, show: Show) -> list[Workload]:
    """Run several workloads by the same processes, one after another.

    Never raises for an error of a rank: it becomes every contender's failure.
    """
    with (
        tempfile.TemporaryDirectory(prefix="ckptstore-bench-") as name,
        _progress_file(Path(name), tasks[0].name, show) as progress,
    ):
        tasks = [replace(task, progress=str(progress)) for task in tasks]
        try:
            with redirect_stdout(StringIO()):  # the peers' output; that of a failure is in the error
                found = in_ranks(tasks[0], ranks, work, tasks)
        except RanksFailed as error:
            failed = {"status": "failed", "reason": str(error)[:2000]}
            return [
                _workload(
                    task,
                    ranks,
                    [
                        WorkloadOutcome(name=kind.name, family=kind.family, role=kind.role, **failed)  # type: ignore[arg-type]
                        for kind in task.contenders()
                    ],
                )
                for task in tasks
            ]
    return [join(task, [rank[number] for rank in found]) for number, task in enumerate(tasks)]


def in_ranks(task: Task, ranks: int, function: Callable[..., T], *args: Any) -> list[T]:
    """Return what a function returns in the process of each rank. Raises RanksFailed."""
    # The test server's credentials, for clients that take them only from the environment.
    names = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "testsecret", "AWS_REGION": "us-east-1"}
    server = task.bucket or task.place
    env = {} if server.endpoint_url is None else names
    if server.authority is not None:
        env |= dict.fromkeys(("AWS_CA_BUNDLE", "SSL_CERT_FILE"), server.authority)
    return run_ranks(ranks, function, *args, timeout_seconds=_TIMEOUT_SECONDS, env=env)


def join(task: Task, found: Sequence[Mapping[str, Any]]) -> Workload:
    """Combine the results of all ranks for one workload."""
    outcomes = [WorkloadOutcome.over_ranks(of) for of in zip(*(rank["outcomes"] for rank in found), strict=True)]
    workload = _workload(task, len(found), outcomes)
    workload = replace(workload, size_bytes=task.moved_bytes([rank["rank_bytes"] for rank in found]))
    if not (watched := [rank["watched"] for rank in found if rank["watched"]]):
        return workload
    calls = dict(sum((Counter(one["calls"]) for one in watched), Counter()))  # `asdict` cannot copy a Counter
    timeline = aligned([one["phases"] for one in watched])
    late = straggler(timeline)
    return replace(
        workload,
        facts={"straggler": {"rank": late[0], "seconds": round(late[1], 6)} if late else None},
        timeline=tuple(timeline),
        outcomes=tuple(replace(one, calls=calls) if one.name == OURS else one for one in outcomes),
    )


def _workload(task: Task, ranks: int, outcomes: Sequence[WorkloadOutcome]) -> Workload:
    return Workload(
        name=task.name,
        title=task.table.title or task.name,
        size_bytes=task.size_bytes,
        ranks=ranks,
        figure=task.table.figure,
        outcomes=tuple(outcomes),
    )


@contextmanager
def _progress_file(directory: Path, workload: str, show: Show) -> Iterator[Path]:
    """Yield a file, and show its lines as they come."""
    path, over = directory / "progress", threading.Event()
    path.touch()

    def follow() -> None:
        count = 0
        with path.open() as file:
            while not over.wait(0.1):
                for line in file:
                    turn = json.loads(line)
                    show(f"{workload}: {turn['turn']}", count, turn["total"])
                    count += 1

    thread = threading.Thread(target=follow, name="ckptstore-bench-progress", daemon=True)
    thread.start()
    try:
        yield path
    finally:
        over.set()
        thread.join()
