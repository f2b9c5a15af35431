"""Boxes: axis-parallel pieces of a tensor, described by offsets and sizes. Pure arithmetic on tuples.

A range of elements below means a range of the tensor's elements in row-major order.
"""

from __future__ import annotations

from collections.abc import Iterator
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
        """The number of elements."""
        return prod(self.sizes)


@lru_cache(maxsize=_KNOWN_SIZES)
def whole(sizes: Sizes) -> Box:
    """Return the box that is all of a tensor."""
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
    """Return True if the elements of the box are a range, without a gap."""
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
