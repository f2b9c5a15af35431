"""The indices that a rank has along each dimension of a tensor that a mesh cuts, as `torch.chunk` cuts. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ckptstore.state.tensors.boxes import Sizes

REPLICATED = -1
"""In place of a dimension of the tensor: this mesh dimension cuts none."""

Runs = list[tuple[int, int]]
"""(first index, length) of each run that a rank has along one dimension, in the order in which it has them."""


class Cut(NamedTuple):
    """The cut that one dimension of a mesh makes."""

    dim: int
    """The dimension of the tensor that it cuts, or `REPLICATED`."""
    split_factor: int = 1
    """The number of chunks into which the dimension is cut first, before each rank gets its share of each chunk. FSDP2
    shards in this order a dimension that tensor parallelism has sharded."""


def runs_of(shape: Sizes, mesh_shape: Sequence[int], cuts: Sequence[Cut], coordinate: Sequence[int]) -> list[Runs]:
    """Return, for each dimension of a tensor, the runs of the rank at a coordinate of the mesh, with neighbours
    joined."""
    runs: list[Runs] = [[(0, size)] for size in shape]
    for (dim, split_factor), shares, share in zip(cuts, mesh_shape, coordinate, strict=True):
        if dim != REPLICATED:
            runs[dim] = shard_runs(runs[dim], shares=shares, share=share, split_factor=split_factor)
    return [_joined(each) for each in runs]


def shard_runs(runs: Runs, *, shares: int, share: int, split_factor: int = 1) -> Runs:
    """Return the runs of one of `shares` ranks along a dimension, as `torch.chunk` cuts it; see `Cut` for the
    factor."""
    length = sum(size for _, size in runs)
    found: Runs = []
    for number in range(min(split_factor, length)):  # all others are empty
        start, stop = _chunk(0, length, split_factor, number)
        found += _taken(runs, *_chunk(start, stop, shares, share))
    return found


def _chunk(start: int, stop: int, count: int, number: int) -> tuple[int, int]:
    size = -(-(stop - start) // count)
    return min(stop, start + number * size), min(stop, start + (number + 1) * size)


def _taken(runs: Runs, first: int, last: int) -> Iterator[tuple[int, int]]:
    """Yield the runs at the positions from `first` to `last` of a sequence of runs."""
    position = 0
    for start, size in runs:
        low, high = max(first, position), min(last, position + size)
        if low < high:
            yield start + low - position, high - low
        position += size


def _joined(runs: Runs) -> Runs:
    found: Runs = []
    for start, size in runs:
        if found and sum(found[-1]) == start:
            found[-1] = found[-1][0], found[-1][1] + size
        else:
            found.append((start, size))
    return found
