"""The contests of the workload "gpu", by one rank and by several, each in processes of its own, so that a crash of one
contest does not end the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from ckptstore.errors import InvalidInput
from ckptstore.tools.bench.destination import Place
from ckptstore.tools.bench.figures.report import OURS, Options, Workload, WorkloadOutcome
from ckptstore.tools.bench.work import Task

GPU_TITLES: Mapping[str, str] = {
    "gpu-stall": "Stall of an asynchronous save",
    "gpu-steps": "Seconds that a training loses to one save beside it",
    "gpu-first": "Stall of the first asynchronous save",
    "gpu-load": "Load into tensors that exist on the device",
}

Contests = Callable[[Sequence[Task], int], list[Workload]]


def check_device(device: str) -> None:
    """Raise InvalidInput if the device does not exist. Takes no memory of a GPU."""
    if device == "cuda" and not torch.cuda.is_available():
        raise InvalidInput(
            f"torch {torch.__version__} finds no GPU here",
            hint="--device cpu rehearses the same with tensors of the CPU",
        )


def on_device(place: Place, options: Options, size_bytes: int, contests: Contests) -> Iterator[Workload]:
    """Run every contest by 1 rank, by 2, and by the requested number, if there are as many GPUs."""
    for ranks in sorted({1, 2, options.ranks}):
        if options.device == "cuda" and ranks > (count := torch.cuda.device_count()):
            reason = f"each rank needs a GPU of its own, and there are {count}"
            left_out = WorkloadOutcome(name=OURS, family=OURS, role="ckptstore", status="skipped", reason=reason)
            title = f"All of it by {ranks} ranks with NCCL"
            yield Workload(name=_named("gpu", ranks), title=title, size_bytes=0, ranks=ranks, outcomes=(left_out,))
            continue
        for name, title in GPU_TITLES.items():
            own = replace(place, uri=f"{place.uri}/{name}-{ranks}")
            if own.is_local:
                own.path.mkdir()
            task = Task(name=name, options=options, place=own, size_bytes=size_bytes)
            (found,) = contests([task], ranks)
            place.remove(own.uri)
            yield replace(found, name=_named(name, ranks), title=title)


def _named(name: str, ranks: int) -> str:
    return name if ranks == 1 else f"{name}-{ranks}-ranks"
