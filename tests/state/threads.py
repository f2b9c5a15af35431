"""The ranks of a job as threads of one process, over a store in memory: the real save and load, hundreds in a second.

DTensors need no process group for it: a mesh is made for each rank.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

import ckptstore
from ckptstore.group.meeting import pack, unpack
from ckptstore.state.write import outlining

_names = itertools.count()


class _Meeting:
    """The answers of all ranks, and what the leader makes of them."""

    def __init__(self, world_size: int) -> None:
        self.answers: list[Any] = [None] * world_size
        self.result: Any = None
        self.barrier = threading.Barrier(world_size)


class ThreadGroup:
    """One rank of several in this process; see `ckptstore.group.Group`."""

    node = "here"

    def __init__(self, rank: int, world_size: int, token: str, meetings: dict[str, _Meeting], name: str = "") -> None:
        self.rank, self.world_size, self.start_token = rank, world_size, token
        self._meetings = meetings
        self._meeting = meetings.setdefault(name, _Meeting(world_size))

    @contextmanager
    def meeting(self, tag: str, *, step: int | None = None) -> Iterator[_Attended]:
        attended = _Attended(self._meeting, self.rank)
        try:
            yield attended
        except Exception as error:
            if not attended.has_ended:
                attended.value = error
                attended.tell(lambda: None)
            raise
        if not attended.has_ended:
            attended.tell(lambda: None)

    def lane(self, name: str) -> ThreadGroup:
        return ThreadGroup(self.rank, self.world_size, self.start_token, self._meetings, name)

    def close(self) -> None:
        """Nothing is held."""


class _Attended:
    """A meeting as one of the threads sees it: answers are compared with no network between."""

    def __init__(self, meeting: _Meeting, rank: int) -> None:
        self._meeting, self._rank = meeting, rank
        self.value: Any = None
        self.has_ended = self._has_met = False

    def gather(self, value: Any = None) -> list[Any]:
        self.value = unpack(pack(value))
        if self._rank:
            return []
        self._meet()
        failed = [answer for answer in self._meeting.answers if isinstance(answer, Exception)]
        return [] if failed else list(self._meeting.answers)

    def _meet(self) -> None:
        if not self._has_met:
            self._meeting.answers[self._rank] = self.value
            self._meeting.barrier.wait(60)
            self._has_met = True

    def tell(self, work: Callable[[], Any]) -> Any:
        meeting, self.has_ended = self._meeting, True
        self._meet()
        if self._rank == 0:
            failed = [answer for answer in meeting.answers if isinstance(answer, Exception)]
            try:
                meeting.result = failed[0] if failed else unpack(pack(work()))
            except Exception as error:
                meeting.result = error
        meeting.barrier.wait(60)
        result = meeting.result
        meeting.barrier.wait(60)
        if isinstance(result, Exception):
            raise result
        return result


def run_threads(world_size: int, uri: str, flow: Callable[[ckptstore.CheckpointStore, int], Any]) -> list[Any]:
    """Call `flow(store, rank)` on every rank at once; what a rank raises is its result."""
    token = f"run{next(_names)}"
    meetings: dict[str, _Meeting] = {}
    groups = [ThreadGroup(rank, world_size, token, meetings) for rank in range(world_size)]

    def run(rank: int) -> Any:
        with ckptstore.open_store(uri, group=groups[rank]) as store:
            try:
                return flow(store, rank)
            except Exception as error:
                return error

    if world_size == 1:
        return [run(0)]
    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(run, range(world_size)))


@contextmanager
def outlined(always: bool = True) -> Iterator[None]:
    """Every index has an outline, where that is possible, however few its chunks are."""
    before = outlining.MANY_CHUNKS
    outlining.MANY_CHUNKS = -1 if always else before
    try:
        yield
    finally:
        outlining.MANY_CHUNKS = before


def new_uri() -> str:
    """A store that nobody has."""
    return f"memory://threads-{next(_names)}"


def mesh_for(rank: int, ranks: Any) -> DeviceMesh:
    """A mesh of these ranks, as one of them sees it; it never communicates."""
    return DeviceMesh("cpu", torch.tensor(ranks), _init_backend=False, _rank=rank)


def distributed(full: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Any], *, zeros: bool = False) -> DTensor:
    """A tensor in a layout, its local part cut out by arithmetic of its own; no part outside of the mesh."""
    local, coordinate = full, mesh.get_coordinate()
    if coordinate is None:
        local = full.new_empty((0,) * full.ndim)
    for dim, placement in enumerate(placements if coordinate is not None else ()):
        if isinstance(placement, Replicate):
            continue
        assert coordinate is not None
        blocks = chunks(local, getattr(placement, "split_factor", 1), placement.dim)
        parts = [chunks(block, mesh.size(dim), placement.dim)[coordinate[dim]] for block in blocks]
        local = torch.cat(parts, placement.dim)
    local = torch.zeros_like(local) if zeros else local.clone()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=full.shape, stride=full.stride())


def chunks(tensor: torch.Tensor, count: int, dim: int) -> list[torch.Tensor]:
    """`torch.chunk`, with empty ones at the end so that there are as many as asked for."""
    found = list(tensor.chunk(count, dim))
    return found + [tensor.narrow(dim, 0, 0)] * (count - len(found))
