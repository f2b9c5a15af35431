"""DTensors of several ranks in one process: a mesh is made for each rank, and needs no process group."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from ckptstore.state.write import outlining

_names = itertools.count()


@contextmanager
def outlined(always: bool = True) -> Iterator[None]:
    """No index is packed where its parts can be apart, however few its chunks are."""
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
    if "_rank" in inspect.signature(DeviceMesh).parameters:
        return DeviceMesh("cpu", torch.tensor(ranks), _init_backend=False, _rank=rank)
    with patch("torch.distributed.device_mesh.get_rank", return_value=rank):  # torch 2.8
        return DeviceMesh("cpu", torch.tensor(ranks), _init_backend=False)


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
