"""Boxes: axis-parallel pieces of a tensor, described by offsets and sizes. Pure arithmetic on tuples.

A range of elements below means a range of the tensor's elements in row-major order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple

Sizes = tuple[int, ...]

_KNOWN_SIZES = 65_536
"""The size of the caches below. Most tensors of a very large state have one of a few shapes."""


class Box(NamedTuple):
    """A piece of a tensor; both tuples have one number for each dimension."""

    offsets: Sizes
    sizes: Sizes

    @property
    def volume(self) -> int:
        return prod(self.sizes)


@lru_cache(maxsize=_KNOWN_SIZES)
def whole(sizes: Sizes) -> Box:
    return Box((0,) * len(sizes), sizes)


def overlap(left: Box, right: Box) -> Box | None:
    """Return the box that two boxes share, None when they share no element."""
    offsets = tuple(map(max, left.offsets, right.offsets))
    ends = [min(a + m, b + n) for a, m, b, n in zip(left.offsets, left.sizes, right.offsets, right.sizes, strict=True)]
    sizes = tuple(end - offset for end, offset in zip(ends, offsets, strict=True))
    return None if any(size <= 0 for size in sizes) else Box(offsets, sizes)


def inside(inner: Box, outer: Box) -> Box:
    """Return the same box, with its offsets counted from where `outer` begins."""
    return Box(tuple(a - b for a, b in zip(inner.offsets, outer.offsets, strict=True)), inner.sizes)


def within(inner: Box, outer: Box) -> Box:
    """Invert `inside`: return a box that is counted from `outer`, counted from the whole tensor."""
    return Box(tuple(a + b for a, b in zip(inner.offsets, outer.offsets, strict=True)), inner.sizes)


@lru_cache(maxsize=_KNOWN_SIZES)
def strides_of(sizes: Sizes) -> Sizes:
    """Return the elements from one index to the next, in each dimension of a contiguous tensor."""
    strides, step = [0] * len(sizes), 1
    for dim in range(len(sizes) - 1, -1, -1):
        strides[dim] = step
        step *= sizes[dim]
    return tuple(strides)


def span(box: Box, sizes: Sizes) -> tuple[int, int]:
    """Return the first element and the number of elements of the shortest range, in a tensor of `sizes`, that has the
    whole box."""
    strides = strides_of(sizes)
    first = sum(offset * stride for offset, stride in zip(box.offsets, strides, strict=True))
    last = first + sum((size - 1) * stride for size, stride in zip(box.sizes, strides, strict=True))
    return first, last - first + 1


def is_range(box: Box, sizes: Sizes) -> bool:
    return span(box, sizes)[1] == box.volume


def runs(box: Box, sizes: Sizes, min_gap: int) -> Iterator[Box]:
    """Cut a box so that no piece skips `min_gap` elements or more between two of its own."""
    strides = strides_of(sizes)
    for dim, (size, stride) in enumerate(zip(box.sizes, strides, strict=True)):
        inner = Box(box.offsets[dim + 1 :], box.sizes[dim + 1 :])
        if size > 1 and stride - span(inner, sizes[dim + 1 :])[1] >= min_gap:
            for index in range(size):
                offset = box.offsets[dim] + index
                piece = Box(
                    (*box.offsets[:dim], offset, *box.offsets[dim + 1 :]), (*box.sizes[:dim], 1, *box.sizes[dim + 1 :])
                )
                yield from runs(piece, sizes, min_gap)
            return
    yield box


def boxes_of_range(sizes: Sizes, start: int, stop: int) -> Iterator[Box]:
    """Yield the boxes that together are the elements from `start` to `stop`; each is a range itself, in order."""
    if start >= stop:
        return
    if not sizes:
        yield Box((), ())
        return
    row = prod(sizes[1:])
    first, last = start // row, (stop - 1) // row
    if first == last:
        for box in boxes_of_range(sizes[1:], start - first * row, stop - first * row):
            yield Box((first, *box.offsets), (1, *box.sizes))
        return
    if start % row:
        yield from boxes_of_range(sizes, start, (first + 1) * row)
        first += 1
    end = stop // row
    if end > first:
        yield Box((first, *(0,) * (len(sizes) - 1)), (end - first, *sizes[1:]))
    if stop % row:
        yield from boxes_of_range(sizes, end * row, stop)


def granule(sizes: Sizes, most: int) -> int:
    """Return the number of elements that a range should be a multiple of: the longest row of any depth with at most
    `most` elements."""
    rows = prod(sizes)
    for size in sizes:
        if rows <= most:
            break
        rows //= size or 1
    return max(rows, 1)


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
            length = sum(size for _, size in runs[dim])
            found: Runs = []
            for number in range(min(split_factor, length)):  # all others are empty
                start, stop = _chunk(0, length, split_factor, number)
                found += _taken(runs[dim], *_chunk(start, stop, shares, share))
            runs[dim] = found
    return [_joined(each) for each in runs]


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
