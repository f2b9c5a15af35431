"""Planning of reads: the blocks of files that fill memory, each block checked. Moves no bytes itself.

A box that is one range in the file and in memory is read straight into place, its ends widened to block borders. The
larger tensors of a slab, which is read as a whole, are too. All else goes through a buffer: small tensors, slices
across rows, memory on a device or of another dtype.
"""

from __future__ import annotations

import ctypes
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from ckptstore.errors import CheckpointDamaged
from ckptstore.format.digest import BLOCK_BYTES, Digest
from ckptstore.runtime.collector import collector_paused
from ckptstore.runtime.new_memory import HUGE_BYTES, new_memory
from ckptstore.state.index.part import Tensor
from ckptstore.state.index.tensor_index import Chunk, TensorIndex
from ckptstore.state.tensors.boxes import Box, inside, is_range, overlap, runs, span, strides_of, whole
from ckptstore.state.tensors.dense import Dense, address_of_view, copy_bytes
from ckptstore.state.tensors.placement import Piece
from ckptstore.state.tensors.segments import narrowed
from ckptstore.state.tensors.tensor_memory import address_of, is_plain_memory, view_of
from ckptstore.transfer import RangeRead

MAX_SKIP_BYTES = 2 << 20
"""The longest gap between wanted bytes that are read in one range, with the gap."""
BUFFER_BYTES = 32 << 20
"""The most that one buffer of a read holds."""
SCATTERED_BYTES = 16 << 10
"""The size below which a copy out of a buffer costs less than one more place to read into."""

Read = Callable[[Sequence[RangeRead]], None]
"""`Transfer.read`."""
Small = tuple[Tensor, Dense, torch.Tensor]
"""A stored tensor, and the memory of a small dense tensor of the same dtype and shape that it fills; that tensor."""
_T = TypeVar("_T")


class Copy(NamedTuple):
    """Bytes of a file, and the memory that they fill."""

    offset: int
    """The offset of the first byte in the file."""
    size_bytes: int
    """The number of bytes from the first to the last one."""
    target: torch.Tensor
    """The memory, of the shape of the box."""
    strides: tuple[int, ...]
    """The strides of the box in the file, in elements."""
    dtype: torch.dtype
    """The dtype in the file, from which a copy casts to that of the memory."""

    @property
    def stop(self) -> int:
        """The end in the file."""
        return self.offset + self.size_bytes

    @property
    def is_whole(self) -> bool:
        """True if the bytes lie in memory as they lie in the file."""
        size_bytes = self.target.numel() * self.target.element_size()
        is_same = size_bytes == self.size_bytes and self.target.dtype == self.dtype
        return is_same and is_plain_memory(self.target)


@dataclass(frozen=True, slots=True)
class SmallCopies:
    """Copies of small tensors, in columns, in the order of offsets in the file."""

    offsets: np.ndarray[Any, Any]
    sizes_bytes: np.ndarray[Any, Any]
    addresses: np.ndarray[Any, Any]
    keeps: Sequence[torch.Tensor]
    """The tensors, kept alive."""

    def __getitem__(self, part: slice) -> SmallCopies:
        return SmallCopies(self.offsets[part], self.sizes_bytes[part], self.addresses[part], self.keeps)

    def between(self, start: int, stop: int) -> SmallCopies:
        """Return those that begin in a stretch of the file."""
        low, high = np.searchsorted(self.offsets, (start, stop)).tolist()
        return self[low:high]

    @property
    def stops(self) -> np.ndarray[Any, Any]:
        """The end of each in the file, or of an earlier one that reaches further."""
        ends: np.ndarray[Any, Any] = np.maximum.accumulate(self.offsets + self.sizes_bytes)
        return ends

    def meets(self, start: int, stop: int) -> bool:
        """Return True if one of them has bytes in a stretch of the file."""
        before = int(np.searchsorted(self.offsets, stop))
        return before > 0 and int(self.stops[before - 1]) > start

    def runs(self, begin: int) -> Iterator[Run]:
        """Yield the copies in runs that share no block of the region that begins at `begin`, unless they are long."""
        stops = self.stops
        starts_block = (self.offsets[1:] - begin) // BLOCK_BYTES > (stops[:-1] - 1 - begin) // BLOCK_BYTES
        starts_length = np.diff((self.offsets - begin) // BUFFER_BYTES) > 0
        cuts = [0, *(np.flatnonzero(starts_block | starts_length) + 1).tolist(), len(self.offsets)]
        for low, high in pairwise(cuts):
            offset = int(self.offsets[low])
            yield Run(offset, int(stops[high - 1]) - offset, self[low:high])

    def empty(self, offset: int, buffer: memoryview) -> None:
        """Copy from a buffer with a stretch of the file, which begins at `offset` in it."""
        if len(self.offsets):
            if not offset <= int(self.offsets[0]) <= int(self.stops[-1]) <= offset + len(buffer):
                raise RuntimeError("a buffer has not the bytes of all small tensors that it is for")
            sources = self.offsets + (address_of_view(buffer) - offset)
            copy_bytes(self.addresses.tolist(), sources.tolist(), self.sizes_bytes.tolist())


class Run(NamedTuple):
    """Small copies that are read together."""

    offset: int
    size_bytes: int
    """The number of bytes from the first to the last one."""
    copies: SmallCopies


@dataclass(slots=True)
class Step:
    """A stretch of a file that is read into a buffer, and the copies out of it afterwards."""

    key: str
    offset: int
    size_bytes: int
    checks: tuple[tuple[int, Digest], ...]
    direct: memoryview | None = None
    """The memory that takes the middle of the stretch directly."""
    direct_offset: int = 0
    copies: list[Copy] = field(default_factory=list)
    small: SmallCopies | None = None

    @property
    def buffer_bytes(self) -> int:
        """The number of bytes that are not read directly."""
        return self.size_bytes - (len(self.direct) if self.direct is not None else 0)

    def range_read(self) -> tuple[RangeRead, memoryview]:
        """Return the read, and the buffer for the bytes that are not read directly."""
        buffer = _buffer(self.buffer_bytes)
        if self.direct is None:
            views: tuple[memoryview, ...] = (buffer,)
        else:
            head = self.direct_offset - self.offset
            views = tuple(part for part in (buffer[:head], self.direct, buffer[head:]) if part)
        return RangeRead(self.key, self.offset, views, self.checks), buffer

    @collector_paused()
    def scattered_read(self) -> tuple[RangeRead, list[Buffered]]:
        """Return the same read with every copy that can be read straight into its memory, and the buffers of the other
        copies."""
        if all(copy.size_bytes < SCATTERED_BYTES for copy in self.copies):
            item, buffer = self.range_read()
            return item, [Buffered(self.offset, buffer, self.copies, self.small)]
        views: list[memoryview] = []
        left: list[Buffered] = []
        start, waiting, waiting_stop = self.offset, list[Copy](), self.offset

        def buffer_until(stop: int) -> None:
            if stop > start:
                view = _buffer(stop - start)
                views.append(view)
                small = None if self.small is None else self.small.between(start, stop)
                left.append(Buffered(start, view, tuple(waiting), small))
            waiting.clear()

        for copy, following in zip(self.copies, [*self.copies[1:], None], strict=True):
            is_apart = waiting_stop <= copy.offset and (following is None or copy.stop <= following.offset)
            is_apart = is_apart and not (self.small is not None and self.small.meets(copy.offset, copy.stop))
            if is_apart and copy.size_bytes >= SCATTERED_BYTES and copy.is_whole:
                buffer_until(copy.offset)
                views.append(view_of(copy.target))
                start = waiting_stop = copy.stop
            else:
                waiting.append(copy)
                waiting_stop = max(waiting_stop, copy.stop)
        buffer_until(self.offset + self.size_bytes)
        return RangeRead(self.key, self.offset, tuple(views), self.checks), left

    def finish(self, buffer: memoryview) -> None:
        """Copy out of the buffer."""
        Buffered(self.offset, buffer, self.copies, self.small).empty()


class Buffered(NamedTuple):
    """A buffer with a stretch of a file, and the copies out of it."""

    offset: int
    """The offset in the file at which the stretch begins."""
    buffer: memoryview
    copies: Sequence[Copy]
    small: SmallCopies | None = None

    def empty(self) -> None:
        """Copy everything to its memory."""
        if self.small is not None:
            self.small.empty(self.offset, self.buffer)
        if not self.copies:
            return
        address, last = address_of_view(self.buffer), len(self.buffer)
        for copy in self.copies:
            start = copy.offset - self.offset
            if copy.is_whole and 0 <= start <= last - copy.size_bytes:  # for a small tensor a view costs too much
                ctypes.memmove(address_of(copy.target, copy.size_bytes), address + start, copy.size_bytes)
            else:
                fill(copy.target, self.buffer[start:][: copy.size_bytes], copy.strides, copy.dtype)


def _buffer(size_bytes: int) -> memoryview:
    """Return new memory."""
    return memoryview(new_memory(size_bytes)) if size_bytes >= HUGE_BYTES else np.empty(size_bytes, np.uint8).data


def fill(target: torch.Tensor, data: memoryview, strides: tuple[int, ...], dtype: torch.dtype) -> None:
    """Copy a box, which lies in `data` with these strides and this dtype, into memory of its shape."""
    size_bytes = target.numel() * target.element_size()
    if size_bytes == len(data) and target.dtype == dtype and is_plain_memory(target):
        view_of(target)[:] = data
        return
    is_aligned = address_of_view(data) % dtype.itemsize == 0
    aligned = torch.frombuffer(data if is_aligned else bytearray(data), dtype=torch.uint8).view(dtype)
    target.copy_(aligned.as_strided(tuple(target.shape), strides))


class ReadPlan:
    """The reads that fill the memory of one rank."""

    def __init__(self, index: TensorIndex, *, prefix: str, checked: bool = True) -> None:
        """Begin a plan. `prefix` is that of the files' keys. With `checked` the index has digests."""
        self._index = index
        self._prefix = prefix
        self._checked = checked
        self._steps: list[Step] = []
        self._shared: defaultdict[int, list[Copy]] = defaultdict(list)
        self._small: dict[int, SmallCopies] = {}
        columns = index.regions.file, index.regions.offset, index.regions.size_bytes
        self._regions = [column.tolist() for column in columns]

    def add(self, source: str, pieces: Iterable[Piece], *, rank: int) -> None:
        """Fill these pieces of the stored tensor `source`, as `rank` stored it if ranks differ. Those of the dtype that
        a tensor had before a save cast it are cast back.

        Raises CheckpointDamaged when the index lacks chunks of them.
        """
        entry = self._index.entry(source, rank)
        cast = entry.torch_dtype if entry is not None and entry.live else None
        for piece in pieces:
            volume, dtype = 0, cast or piece.tensor.dtype
            for chunk in self._index.chunks(source, rank, piece.box):
                if chunk.box == piece.box:
                    volume += piece.box.volume
                    self._add_box(chunk, whole(chunk.box.sizes), piece.tensor, dtype)
                elif (common := overlap(chunk.box, piece.box)) is not None:
                    volume += common.volume
                    target = narrowed(piece.tensor, inside(common, piece.box))
                    self._add_box(chunk, inside(common, chunk.box), target, dtype)
            if volume != piece.box.volume:
                raise CheckpointDamaged(f"the checkpoint has not all of {source}: a chunk is missing")

    def add_small(self, small: Sequence[Small]) -> list[tuple[str, torch.Tensor]]:
        """Fill small tensors whose stored ones all ranks have alike. Called once. Return the keys and tensors of those
        that are not one chunk in a slab."""
        if not small:
            return []
        entries, memory, tensors = zip(*small, strict=True)
        is_one, offsets, regions = self._index.whole_chunks(entries)
        sizes = np.array([dense.form.size_bytes for dense in memory], np.int64)
        addresses = np.array([dense.address for dense in memory], np.int64)
        taken = np.flatnonzero(is_one & (self._index.regions.size_bytes[regions] != sizes))
        taken = taken[np.lexsort((offsets[taken], regions[taken]))]
        cuts = (np.flatnonzero(np.diff(regions[taken])) + 1).tolist()
        for low, high in pairwise([0, *cuts, len(taken)] if len(taken) else []):
            at = taken[low:high]
            self._small[int(regions[at[0]])] = SmallCopies(offsets[at], sizes[at], addresses[at], tensors)
        left = np.ones(len(sizes), bool)
        left[taken] = False
        return [(entries[index].key, tensors[index]) for index in np.flatnonzero(left).tolist()]

    def _add_box(self, chunk: Chunk, box: Box, target: torch.Tensor, dtype: torch.dtype) -> None:
        element_bytes = dtype.itemsize
        size_bytes = self._regions[2][chunk.region]
        is_own = self._regions[1][chunk.region] == chunk.offset and size_bytes == chunk.box.volume * element_bytes
        strides = strides_of(chunk.box.sizes)
        if not is_own:
            first, count = (0, box.volume) if box.sizes == chunk.box.sizes else span(box, chunk.box.sizes)
            copy = Copy(chunk.offset + first * element_bytes, count * element_bytes, target, strides, dtype)
            self._shared[chunk.region].append(copy)
        elif target.dtype == dtype and is_plain_memory(target) and is_range(box, chunk.box.sizes):
            first, count = span(box, chunk.box.sizes)
            offset = chunk.offset + first * element_bytes
            step = self._add_step(chunk.region, offset, offset + count * element_bytes)
            step.direct, step.direct_offset = view_of(target), offset
        else:
            most = BUFFER_BYTES // element_bytes
            stretches = runs(box, chunk.box.sizes, MAX_SKIP_BYTES // element_bytes)
            for piece in (piece for run in stretches for piece in halves(run, chunk.box.sizes, most)):
                first, count = span(piece, chunk.box.sizes)
                inner = narrowed(target, inside(piece, box))
                copy = Copy(chunk.offset + first * element_bytes, count * element_bytes, inner, strides, dtype)
                self._add_step(chunk.region, copy.offset, copy.stop).copies = [copy]

    def _add_step(self, region: int, start: int, stop: int) -> Step:
        """Add and return the step that reads a stretch of a region, widened to the borders of its blocks."""
        file, begin, size_bytes = (column[region] for column in self._regions)
        checks: tuple[tuple[int, Digest], ...] = ()
        if self._checked:
            low = (start - begin) // BLOCK_BYTES
            high = -(-(stop - begin) // BLOCK_BYTES)
            end = min(high * BLOCK_BYTES, size_bytes)
            sizes = [BLOCK_BYTES] * (high - low)
            sizes[-1] = end - (high - 1) * BLOCK_BYTES
            checks = tuple(zip(sizes, self._index.digests(region, low, high), strict=True))
            start, stop = begin + low * BLOCK_BYTES, begin + end
        step = Step(self._prefix + self._index.files[file], start, stop - start, checks)
        self._steps.append(step)
        return step

    def steps(self) -> Iterator[Step]:
        """Yield all steps, in the order of files and offsets."""
        for region in self._shared.keys() | self._small.keys():
            begin, small = self._regions[1][region], self._small.get(region)
            items = [*self._shared.get(region, ()), *(() if small is None else small.runs(begin))]
            items.sort(key=lambda item: item.offset)
            for group in _groups(items, begin):
                start, stop = group[0].offset, max(item.offset + item.size_bytes for item in group)
                copies = [item for item in group if isinstance(item, Copy)]
                runs = [item.copies for item in group if isinstance(item, Run)]
                step = self._add_step(region, start, stop)
                step.copies, step.small = copies, _joined(runs)
        self._shared.clear()
        self._small.clear()
        self._steps.sort(key=lambda step: (step.key, step.offset))
        yield from self._steps


def _joined(runs: Sequence[SmallCopies]) -> SmallCopies | None:
    """Return the copies of runs that follow each other."""
    if len(runs) < 2:
        return runs[0] if runs else None
    return SmallCopies(
        np.concatenate([run.offsets for run in runs]),
        np.concatenate([run.sizes_bytes for run in runs]),
        np.concatenate([run.addresses for run in runs]),
        runs[0].keeps,
    )


def _groups(copies: Sequence[Copy | Run], begin: int) -> Iterator[list[Copy | Run]]:
    """Yield the copies of one region that are read together: without a gap worth a new read, and no more than a buffer.

    A group ends where a block ends, if possible, so that no block is read twice.
    """
    group: list[Copy | Run] = []
    stop = 0
    for copy in copies:
        if group:
            is_far = copy.offset - stop >= MAX_SKIP_BYTES
            starts_block = (copy.offset - begin) // BLOCK_BYTES > (stop - 1 - begin) // BLOCK_BYTES
            is_full = copy.offset + copy.size_bytes - group[0].offset > BUFFER_BYTES
            if is_far or (is_full and starts_block) or copy.offset - group[0].offset > 2 * BUFFER_BYTES:
                yield group
                group, stop = [], 0
        group.append(copy)
        stop = max(stop, copy.offset + copy.size_bytes)
    if group:
        yield group


def halves(box: Box, sizes: tuple[int, ...], most: int) -> Iterator[Box]:
    """Yield the parts of a box of a tensor of these sizes, halved until none spans more than `most` elements."""
    if span(box, sizes)[1] <= most or box.volume == 1:
        yield box
        return
    dim = next(dim for dim, size in enumerate(box.sizes) if size > 1)
    half = box.sizes[dim] // 2
    for offset, size in ((0, half), (half, box.sizes[dim] - half)):
        offsets = (*box.offsets[:dim], box.offsets[dim] + offset, *box.offsets[dim + 1 :])
        yield from halves(Box(offsets, (*box.sizes[:dim], size, *box.sizes[dim + 1 :])), sizes, most)


RunSteps = Callable[[Iterable[Step], Read, int], None]
"""Carries out the steps of a read. The number is the most bytes of its buffers at once."""


def run_steps(steps: Iterable[Step], read: Read, buffer_bytes: int) -> None:
    """Read and copy, with buffers of at most `buffer_bytes` at once."""
    for wave in grouped(steps, lambda step: step.buffer_bytes, buffer_bytes):
        _run_wave(wave, read)


def _run_wave(wave: Sequence[Step], read: Read) -> None:
    reads = [step.scattered_read() for step in wave]  # they end with the call, before those of the next wave are made
    read([item for item, _ in reads])
    for _, left in reads:
        for buffered in left:
            buffered.empty()


def grouped(items: Iterable[_T], size_of: Callable[[_T], int], most_bytes: int) -> Iterator[list[_T]]:
    """Yield items in their order, in groups of at most so many bytes; a larger item has a group of its own."""
    group: list[_T] = []
    used_bytes = 0
    for item in items:
        size_bytes = size_of(item)
        if group and used_bytes + size_bytes > most_bytes:
            yield group
            group, used_bytes = [], 0
        group.append(item)
        used_bytes += size_bytes
    if group:
        yield group
