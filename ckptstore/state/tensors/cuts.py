"""What a rank has along each dimension of a tensor that a mesh cuts, as `torch.chunk` cuts. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ckptstore.state.tensors.boxes import Sizes

REPLICATED = -1
"""In place of a dimension of the tensor: this mesh dimension cuts none."""

Runs = list[tuple[int, int]]
"""(first index, length) of what a rank has along one dimension, in the order in which it has it."""


class Cut(NamedTuple):
    """What one dimension of a mesh does."""

    dim: int
    """The dimension of the tensor that it cuts, or `REPLICATED`."""
    split_factor: int = 1
    """The dimension is cut into so many chunks first, and each rank gets its share of each: the order in which FSDP2
    shards what tensor parallelism has sharded."""


def runs_of(shape: Sizes, mesh_shape: Sequence[int], cuts: Sequence[Cut], coordinate: Sequence[int]) -> list[Runs]:
    """For each dimension of a tensor what the rank at a coordinate of the mesh has; neighbours are joined."""
    runs: list[Runs] = [[(0, size)] for size in shape]
    for (dim, split_factor), shares, share in zip(cuts, mesh_shape, coordinate, strict=True):
        if dim != REPLICATED:
            runs[dim] = shard_runs(runs[dim], shares=shares, share=share, split_factor=split_factor)
    return [_joined(each) for each in runs]


def shard_runs(runs: Runs, *, shares: int, share: int, split_factor: int = 1) -> Runs:
    """What one of `shares` ranks gets of a dimension, as `torch.chunk` cuts it; see `Cut` for the factor."""
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
    """What the positions from `first` to `last` of a sequence of runs are."""
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
