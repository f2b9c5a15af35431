"""Dealing of tensors that several ranks have alike, so that each writes its share. Pure and the same on every rank."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from ckptstore.format.digest import BLOCK_BYTES
from ckptstore.state.tensors.boxes import Box, Sizes, boxes_of_range, granule, within

MAX_CHUNK_BYTES = 1 << 30
"""The most bytes of a chunk. A larger box is cut, so that several files and threads share it and frames stay below 4
GiB."""
_MAX_IMBALANCE = 0.01


class Dealt(NamedTuple):
    """A tensor, or the box of one, that is shared out."""

    sizes: Sizes
    element_bytes: int
    is_whole: bool = False
    """True if it may not be cut, however large it is."""

    @property
    def size_bytes(self) -> int:
        """The size in bytes."""
        volume = self.element_bytes
        for size in self.sizes:
            volume *= size
        return volume


def deal(items: Sequence[Dealt], shares: int, share: int) -> Iterator[tuple[int, int, int]]:
    """Yield (index, first element, last element + 1) of each item in one of the shares, in order.

    The items lie on a line that is cut into stretches of equal bytes. A cut inside an item below 1 MiB moves to its
    nearer end, one inside a larger item to a row, so that no share is off by more than that or by 1 %. There are no
    shares below 1 MiB: the last ones stay empty instead, so that small tensors that all ranks need are on few ranks.
    """
    sizes = [item.size_bytes for item in items]
    ends = list(accumulate(sizes))
    total = ends[-1] if ends else 0
    shares = min(shares, max(1, total // BLOCK_BYTES))
    if share >= shares:
        return
    low = _cut(items, sizes, ends, total * share // shares, total // shares)
    high = _cut(items, sizes, ends, total * (share + 1) // shares, total // shares)
    start, first = low
    stop, last = high
    for index in range(start, min(stop + 1, len(items))):
        begin = first if index == start else 0
        end = last if index == stop else sizes[index] // items[index].element_bytes
        if begin < end:
            yield index, begin, end


def _cut(items: Sequence[Dealt], sizes: list[int], ends: list[int], at_bytes: int, share_bytes: int) -> tuple[int, int]:
    """Return the item and element before which the line is cut near a place."""
    index = bisect_right(ends, at_bytes)
    if index == len(items):
        return index, 0
    item, into_bytes = items[index], at_bytes - (ends[index] - sizes[index])
    if sizes[index] < BLOCK_BYTES or item.is_whole:
        return (index, 0) if into_bytes * 2 < sizes[index] else (index + 1, 0)
    most = max(1, int(share_bytes * _MAX_IMBALANCE) // item.element_bytes)
    rows = granule(item.sizes, most)
    element = (into_bytes // item.element_bytes + rows // 2) // rows * rows
    volume = sizes[index] // item.element_bytes
    return (index, element) if element < volume else (index + 1, 0)


def chunks_of(box: Box, element_bytes: int, start: int = 0, stop: int | None = None) -> list[Box]:
    """Return the boxes, counted as `box` is, that hold its elements from `start` to `stop`, none above 1 GiB."""
    volume = box.volume
    stop = volume if stop is None else stop
    if start == 0 and stop == volume and volume * element_bytes <= MAX_CHUNK_BYTES:
        return [box] if volume else []
    most = MAX_CHUNK_BYTES // element_bytes
    rows = granule(box.sizes, most)
    step = most // rows * rows
    found = []
    for first in range(start, stop, step):
        found += [within(inner, box) for inner in boxes_of_range(box.sizes, first, min(first + step, stop))]
    return found
