"""State files as sources: gathered from tensor memory as they are written, so that no payload is copied twice.

A file is a sequence of segments. Headers, trailers and large contiguous host tensors are memory as it is; many small
tensors are put together, frames and all, for the stretch that is asked for; tensors on a device or with strides are
copied stretch by stretch into the buffer of the transfer.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Protocol

import torch

from ckptstore.state.tensors.boxes import Box, boxes_of_range
from ckptstore.state.tensors.frames import Template
from ckptstore.state.tensors.tensor_memory import is_plain_memory, view_of
from ckptstore.transfer.sources import Read


class Segment(Protocol):
    """A stretch of a file."""

    @property
    def size_bytes(self) -> int:
        """How many bytes there are."""

    @property
    def in_memory(self) -> bool:
        """Whether reading copies nothing."""

    def read(self, offset: int, size_bytes: int, scratch: memoryview) -> memoryview:
        """The bytes of a range, in memory that stays, or in `scratch`."""


@dataclass(frozen=True, slots=True)
class Bytes:
    """Memory as it is."""

    view: memoryview | bytes
    keeps: torch.Tensor | None = None
    """The tensor whose memory it is."""
    in_memory: bool = True

    @property
    def size_bytes(self) -> int:
        """How many bytes there are."""
        return len(self.view)

    def read(self, offset: int, size_bytes: int, scratch: memoryview) -> memoryview:
        """Without a copy."""
        return memoryview(self.view)[offset : offset + size_bytes]


@dataclass(frozen=True, slots=True)
class Copied:
    """A tensor whose bytes do not simply lie in host memory."""

    tensor: torch.Tensor
    in_memory: bool = False

    @property
    def size_bytes(self) -> int:
        """How many bytes it has when it is contiguous."""
        return self.tensor.numel() * self.tensor.element_size()

    def read(self, offset: int, size_bytes: int, scratch: memoryview) -> memoryview:
        """Copy the elements that cover the range to the host."""
        element_bytes = self.tensor.element_size()
        first, last = offset // element_bytes, -(-(offset + size_bytes) // element_bytes)
        is_whole = first * element_bytes == offset and last * element_bytes == offset + size_bytes
        if is_whole and len(scratch) >= size_bytes:
            target = torch.frombuffer(scratch, dtype=torch.uint8, count=size_bytes).view(self.tensor.dtype)
        else:
            target = torch.empty(last - first, dtype=self.tensor.dtype)
        done = 0
        for box in boxes_of_range(tuple(self.tensor.shape), first, last):
            piece = narrowed(self.tensor, box)
            target[done : done + box.volume].copy_(piece.reshape(-1) if piece.is_contiguous() else piece.flatten())
            done += box.volume
        start = offset - first * element_bytes
        if is_whole and len(scratch) >= size_bytes:
            return scratch[:size_bytes]
        return memoryview(bytes(view_of(target)[start : start + size_bytes]))


@dataclass(frozen=True, slots=True)
class Slab:
    """Many small tensors in their frames, put together when they are read."""

    templates: Sequence[Template]
    tensors: Sequence[torch.Tensor]
    ends: Sequence[int] = field(default=(), repr=False)
    in_memory: bool = False

    @staticmethod
    def of(templates: Sequence[Template], tensors: Sequence[torch.Tensor]) -> Slab:
        """The frames of these tensors, one after another."""
        return Slab(templates, tensors, list(accumulate(template.size_bytes for template in templates)))

    @property
    def size_bytes(self) -> int:
        """Of all frames."""
        return self.ends[-1]

    def read(self, offset: int, size_bytes: int, scratch: memoryview) -> memoryview:
        """The frames that cover the range, joined."""
        first, last = bisect_right(self.ends, offset), bisect_right(self.ends, offset + size_bytes - 1)
        payloads = _payloads(self.tensors[first : last + 1])
        parts: list[bytes] = []
        for template, payload in zip(self.templates[first : last + 1], payloads, strict=True):
            parts += (template.header, payload, template.trailer)
        start = offset - (self.ends[first - 1] if first else 0)
        return memoryview(b"".join(parts))[start : start + size_bytes]


def _payloads(tensors: Sequence[torch.Tensor]) -> list[bytes]:
    """The bytes of small tensors; those on a device come in one transfer for each device."""
    found: list[bytes] = [b""] * len(tensors)
    away: dict[torch.device, list[int]] = {}
    for index, tensor in enumerate(tensors):
        if is_plain_memory(tensor):
            found[index] = ctypes.string_at(tensor.data_ptr(), tensor.numel() * tensor.element_size())
        else:
            away.setdefault(tensor.device, []).append(index)
    for indices in away.values():
        flat = [_as_bytes(tensors[index]) for index in indices]
        joined = torch.cat(flat).cpu()
        view, start = view_of(joined), 0
        for index, part in zip(indices, flat, strict=True):
            found[index] = bytes(view[start : start + part.numel()])
            start += part.numel()
    return found


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def narrowed(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """The part of a tensor that a box is."""
    if box.sizes == tuple(tensor.shape):
        return tensor
    return tensor[tuple(slice(offset, offset + size) for offset, size in zip(box.offsets, box.sizes, strict=True))]


def payload_segment(tensor: torch.Tensor) -> Segment:
    """The segment of one tensor's payload."""
    return Bytes(view_of(tensor), keeps=tensor) if is_plain_memory(tensor) else Copied(tensor)


@dataclass(frozen=True, slots=True)
class SegmentSource:
    """A file made of segments. The tensors stay unchanged until it has been written."""

    segments: Sequence[Segment]
    payloads: Sequence[tuple[int, int]]
    ends: Sequence[int]
    in_memory: bool

    @staticmethod
    def of(segments: Sequence[Segment], payloads: Sequence[tuple[int, int]]) -> SegmentSource:
        """The file of these segments; `payloads` are the (offset, size) of the regions with digests."""
        ends = list(accumulate(segment.size_bytes for segment in segments))
        return SegmentSource(segments, payloads, ends, all(segment.in_memory for segment in segments))

    @property
    def size_bytes(self) -> int:
        """Of the whole file."""
        return self.ends[-1] if self.ends else 0

    @contextmanager
    def open(self) -> Iterator[Read]:
        """Nothing can change on its own here."""
        yield self._read

    def _read(self, offset: int, size_bytes: int, scratch: memoryview) -> Sequence[memoryview]:
        index = bisect_right(self.ends, offset)
        found: list[memoryview] = []
        used = 0
        while size_bytes:
            start = offset - (self.ends[index - 1] if index else 0)
            segment = self.segments[index]
            count = min(size_bytes, segment.size_bytes - start)
            if count:
                found.append(segment.read(start, count, scratch[used : used + count]))
            used += 0 if segment.in_memory else count
            offset, size_bytes, index = offset + count, size_bytes - count, index + 1
        return found
