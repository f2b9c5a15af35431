"""State files as sources: gathered from tensor memory as they are written, so that no payload is copied twice.

A file is a sequence of segments. Headers, trailers and large contiguous host tensors are unchanged memory. Many small
tensors and their frames are joined for each stretch that is read. Tensors on a device or with strides are copied
stretch by stretch into the buffer of the transfer.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import torch

from ckptstore.state.tensors.boxes import Box, boxes_of_range
from ckptstore.state.tensors.cast_loss import check_cast
from ckptstore.state.tensors.dense import address_of_view, copy_bytes
from ckptstore.state.tensors.frames import Template
from ckptstore.state.tensors.tensor_memory import as_bytes, is_plain_memory, view_of
from ckptstore.transfer.sources import Read


@dataclass(frozen=True, slots=True)
class Bytes:
    """Unchanged memory."""

    memory: memoryview
    keeps: torch.Tensor | None = None
    """The tensor whose memory it is, kept alive."""

    @property
    def size_bytes(self) -> int:
        return len(self.memory)

    def fill(self, offset: int, target: memoryview) -> None:
        """Copy memory; the interpreter lock is free meanwhile, except for headers, which are read-only and short."""
        source = self.memory[offset : offset + len(target)]
        if source.readonly or not source:
            target[:] = source
        else:
            ctypes.memmove(address_of_view(target), address_of_view(source), len(target))


@dataclass(frozen=True, slots=True)
class Copied:
    """A tensor whose bytes do not simply lie in host memory, or that is stored in another dtype."""

    tensor: torch.Tensor
    cast: torch.dtype | None = None
    """The dtype in which it is stored; None if that is its own."""
    key: str = ""
    """The key of a tensor that is cast, for errors."""
    memory: None = None

    @property
    def size_bytes(self) -> int:
        return self.tensor.numel() * (self.cast or self.tensor.dtype).itemsize

    def fill(self, offset: int, target: memoryview) -> None:
        """Copy the elements that cover the range to the host. Raises InvalidState if the dtype to store them in cannot
        hold one."""
        bits = bits_of(self.tensor) if self.cast is None else self.tensor
        dtype = self.cast or bits.dtype
        element_bytes = dtype.itemsize
        first, last = offset // element_bytes, -(-(offset + len(target)) // element_bytes)
        before, after = offset - first * element_bytes, last * element_bytes - offset - len(target)
        if before or after:  # it begins or ends inside of an element
            whole = memoryview(bytearray((last - first) * element_bytes))
            self.fill(first * element_bytes, whole)
            target[:] = whole[before : len(whole) - after]
            return
        flat = torch.frombuffer(target, dtype=torch.uint8).view(dtype)
        done = 0
        for box in boxes_of_range(tuple(bits.shape), first, last):
            made, part = flat[done : done + box.volume].view(box.sizes), narrowed(bits, box)
            made.copy_(part)
            if self.cast is not None:
                check_range(self.key, part, made)
            done += box.volume


def check_range(key: str, tensor: torch.Tensor, made: torch.Tensor) -> None:
    """Raise InvalidState if a number of a tensor is beyond what the dtype of its cast can hold. Infinities and NaN may
    be cast to dtypes that have them."""
    is_narrow = torch.finfo(made.dtype).max < torch.finfo(torch.bfloat16).max
    hint = f"Take it out of dtype{', or give bfloat16, which has the range of float32' if is_narrow else ''}"
    check_cast(key, tensor, made, hint=hint)


class SlabLayout:
    """The places of small tensors in a slab. Holds no tensor."""

    def __init__(self, templates: Sequence[Template]) -> None:
        """Put frames one after another."""
        self.templates = templates
        self.ends = list(accumulate([template.size_bytes for template in templates]))
        starts = [0, *self.ends[:-1]]
        self.payload_offsets = [start + len(template.header) for start, template in zip(starts, templates, strict=True)]
        self.payload_sizes = [template.payload_bytes for template in templates]
        self.payload_bytes = sum(self.payload_sizes)
        known: dict[tuple[int, int], bytes] = {}
        self.gaps: list[bytes] = []
        """The bytes between two payloads: the end of one frame and the beginning of the next."""
        for before, behind in pairwise(templates):
            gap = known.get((id(before), id(behind)))
            if gap is None:
                gap = known[id(before), id(behind)] = before.trailer + behind.header
            self.gaps.append(gap)

    @property
    def size_bytes(self) -> int:
        return self.ends[-1]


@dataclass(slots=True)
class Slab:
    """Many small tensors in their frames, joined when they are read."""

    layout: SlabLayout
    tensors: Sequence[torch.Tensor]
    addresses: Sequence[int] = ()
    """The addresses of the tensors, 0 for one that is not dense; empty where they are not known."""
    memory: None = None

    @property
    def size_bytes(self) -> int:
        return self.layout.size_bytes

    def fill(self, offset: int, target: memoryview) -> None:
        """Join the frames that cover the range, and write the range to `target`."""
        ends, stop = self.layout.ends, offset + len(target)
        first, last = bisect_right(ends, offset), bisect_right(ends, stop - 1)
        low = first if offset == (ends[first - 1] if first else 0) else first + 1
        high = last + 1 if stop == ends[last] else last
        if low < high and self.addresses and all(self.addresses[low:high]):
            start, end = ends[low - 1] if low else 0, ends[high - 1]
            self._join(offset, start, target[: start - offset])
            self._copy(low, high, target[start - offset : end - offset])
            self._join(end, stop, target[end - offset :])
        else:
            self._join(offset, stop, target)

    def _copy(self, low: int, high: int, target: memoryview) -> None:
        """Copy whole frames of dense tensors, without an object for each."""
        layout, start = self.layout, self.layout.ends[low - 1] if low else 0
        offsets, sizes, gaps = (
            layout.payload_offsets[low:high],
            layout.payload_sizes[low:high],
            layout.gaps[low : high - 1],
        )
        base = address_of_view(target) - start
        copy_bytes([base + at for at in offsets], self.addresses[low:high], sizes)
        copy_bytes([base + at + size for at, size in zip(offsets, sizes, strict=True)], gaps, map(len, gaps))
        header, trailer = layout.templates[low].header, layout.templates[high - 1].trailer
        target[: len(header)], target[len(target) - len(trailer) :] = header, trailer

    def _join(self, offset: int, stop: int, target: memoryview) -> None:
        """Write a range of any frames."""
        if offset == stop:
            return
        ends = self.layout.ends
        first, last = bisect_right(ends, offset), bisect_right(ends, stop - 1)
        payloads = _payloads(self.tensors[first : last + 1])
        parts: list[bytes] = []
        for template, payload in zip(self.layout.templates[first : last + 1], payloads, strict=True):
            parts += (template.header, payload, template.trailer)
        start = offset - (ends[first - 1] if first else 0)
        target[:] = memoryview(b"".join(parts))[start : start + len(target)]


Segment = Bytes | Copied | Slab
"""A stretch of a file. `memory` has its bytes if they lie in host memory as they are to be stored; `fill` writes those
from an offset on over all of a target, and over nothing else."""


def _payloads(tensors: Sequence[torch.Tensor]) -> list[bytes]:
    """Return the bytes of small tensors; those on a device come in one transfer for each device."""
    found: list[bytes] = [b""] * len(tensors)
    away: dict[torch.device, list[int]] = {}
    for index, tensor in enumerate(tensors):
        if is_plain_memory(tensor):
            found[index] = ctypes.string_at(tensor.data_ptr(), tensor.numel() * tensor.element_size())
        else:
            away.setdefault(tensor.device, []).append(index)
    for indices in away.values():
        flat = [as_bytes(tensors[index]) for index in indices]
        joined = torch.cat(flat).cpu()
        view, start = view_of(joined), 0
        for index, part in zip(indices, flat, strict=True):
            found[index] = bytes(view[start : start + part.numel()])
            start += part.numel()
    return found


def narrowed(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    if box.sizes == tuple(tensor.shape):
        return tensor
    return tensor[tuple(slice(offset, offset + size) for offset, size in zip(box.offsets, box.sizes, strict=True))]


def payload_segment(tensor: torch.Tensor, cast: torch.dtype | None = None, key: str = "") -> Segment:
    if cast is not None:
        return Copied(tensor, cast, key)
    return Bytes(view_of(tensor), keeps=tensor) if is_plain_memory(tensor) else Copied(tensor)


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same memory as whole numbers, for which torch has every operation. Return a tensor that shows its
    memory conjugated or negated unchanged."""
    if tensor.is_conj() or tensor.is_neg() or tensor.element_size() not in _WHOLE_NUMBERS:
        return tensor
    return tensor.view(_WHOLE_NUMBERS[tensor.element_size()])


_WHOLE_NUMBERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(slots=True)
class SegmentSource:
    """A file made of segments. The tensors stay unchanged until it has been written."""

    segments: Sequence[Segment]
    payloads: Sequence[tuple[int, int]]
    """The (offset, size) of the regions with digests."""
    ends: Sequence[int] = field(init=False)
    in_memory: bool = field(init=False)

    def __post_init__(self) -> None:
        self.ends = list(accumulate(segment.size_bytes for segment in self.segments))
        self.in_memory = all(segment.memory is not None for segment in self.segments)

    @property
    def size_bytes(self) -> int:
        return self.ends[-1] if self.ends else 0

    @contextmanager
    def open(self) -> Iterator[Read]:
        """Yield the function that reads the file. No check for changes is needed: the tensors stay unchanged."""
        yield self._read

    def _read(self, offset: int, size_bytes: int, scratch: memoryview) -> Sequence[memoryview]:
        found: list[memoryview] = []
        used = 0
        for segment, start, count in self._stretches(offset, size_bytes):
            if segment.memory is not None:
                found.append(segment.memory[start : start + count])
            else:
                segment.fill(start, scratch[used : used + count])
                found.append(scratch[used : used + count])
                used += count
        return found

    def fill(self, offset: int, target: memoryview) -> None:
        """Write the bytes from `offset` on over all of `target`, and over nothing else: each is copied once."""
        done = 0
        for segment, start, count in self._stretches(offset, len(target)):
            segment.fill(start, target[done : done + count])
            done += count

    def _stretches(self, offset: int, size_bytes: int) -> Iterator[tuple[Segment, int, int]]:
        """Yield the segments that hold a range, each with the start and the length of its part of the range in it."""
        index = bisect_right(self.ends, offset)
        while size_bytes:
            start = offset - (self.ends[index - 1] if index else 0)
            segment = self.segments[index]
            count = min(size_bytes, segment.size_bytes - start)
            if count:
                yield segment, start, count
            offset, size_bytes, index = offset + count, size_bytes - count, index + 1
