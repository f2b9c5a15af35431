"""Share the facts of one process among its contenders: its rank, the state to save, the place."""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from ckptstore.tools.bench.destination import Place
from ckptstore.tools.bench.shapes import TENSOR_BYTES, State, empty_like, rank_state, size_of

T = TypeVar("T")

_COLLECTIVE_TIMEOUT = datetime.timedelta(minutes=10)


@dataclass(kw_only=True)
class Case:
    """One process of a benchmark."""

    place: Place
    rank: int
    world_size: int
    durable: bool
    drop_caches: bool = False
    pause_seconds: float = 0.0
    """Seconds without work before each timed turn."""
    device: str = "cpu"
    """Device of the tensors: "cpu", or the GPU of this rank."""
    size_bytes: int = 0
    """The requested size of the whole state."""
    bucket: Place | None = None
    """Bucket to which checkpoints are drained, in the workload with a fast tier."""
    num_checkpoints: int = 0
    """The checkpoints of the store at the place, if contenders look for them."""
    local: State = field(default_factory=dict)
    """This rank's own tensors."""
    state: Mapping[str, Any] = field(default_factory=dict)
    """The tensors as the job sees them: rows of DTensors, if there are several ranks."""
    local_target: State = field(default_factory=dict)
    target: Mapping[str, Any] = field(default_factory=dict)
    files: Path = Path()
    """The directory to save, in the workloads that save one."""
    rank_bytes: int = 0
    """The bytes of this rank's share."""

    @property
    def alone(self) -> bool:
        """True if there are no other ranks."""
        return self.world_size == 1

    @property
    def is_cuda(self) -> bool:
        """True if the tensors are on a GPU."""
        return self.device != "cpu"

    def synchronize(self) -> None:
        """Wait for all work launched on the device."""
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def enter_thread(self) -> None:
        """Have this thread work on the device. A new thread begins on the first GPU, which may be another rank's."""
        if self.is_cuda:
            torch.cuda.set_device(self.device)

    def make_state(self, shape: str, size_bytes: int, tensor_bytes: int = TENSOR_BYTES) -> None:
        """Create the state of this rank, its share of `size_bytes`."""
        found = rank_state(shape, size_bytes // self.world_size, rank=self.rank, tensor_bytes=tensor_bytes)
        self.local = {name: tensor.to(self.device) for name, tensor in found.items()}
        self.state = self._as_job_sees(self.local)
        self.rank_bytes = size_of(self.local)

    def make_target(self) -> None:
        """Create tensors to load into."""
        self.local_target = empty_like(self.local)
        self.target = self._as_job_sees(self.local_target)

    def _as_job_sees(self, local: State) -> Mapping[str, Any]:
        if self.alone:
            return local
        mesh = init_device_mesh("cuda" if self.is_cuda else "cpu", (self.world_size,))
        return {name: DTensor.from_local(tensor, mesh, [Shard(0)], run_check=False) for name, tensor in local.items()}

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks; a barrier too. Collective."""
        if self.alone:
            return [value]
        found: list[Any] = [None] * self.world_size
        dist.all_gather_object(found, value)
        return found

    def uri(self, *parts: str) -> str:
        """Return a place below the run's."""
        return "/".join((self.place.uri, *parts))


@contextmanager
def process_group(device: str = "cpu") -> Iterator[tuple[int, int]]:
    """Open a process group, gloo for peers on the CPU and NCCL for tensors on GPUs; yield rank and world size.

    Each rank computes with its share of the cores.
    """
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=_COLLECTIVE_TIMEOUT)
    try:
        rank, world_size = dist.get_rank(), dist.get_world_size()
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // world_size))
        if device == "cuda":
            torch.cuda.set_device(rank)
        yield rank, world_size
    finally:
        dist.destroy_process_group()
