"""The contests of the workload "gpu", by one rank and by several, each in processes of its own, so that a crash of one
contest does not end the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from ckptstore.tools.bench.figures.report import OURS, Workload, WorkloadOutcome
from ckptstore.tools.bench.peers.registry import TABLES
from ckptstore.tools.bench.work import Contests, Task

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
