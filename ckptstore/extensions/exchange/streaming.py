"""Stream the bytes of stored tensors in batches, so that a state of any size passes through."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import IO, Protocol

import torch

from ckptstore.events import BytesMoved, emit, is_heard
from ckptstore.state.index.part import Tensor
from ckptstore.state.read.read_plan import grouped
from ckptstore.state.tensors.boxes import Box, boxes_of_range
from ckptstore.state.tensors.placement import Piece
from ckptstore.state.tensors.tensor_memory import view_of

BATCH_BYTES = 64 << 20
"""The most memory held at once."""
_LEAST_BYTES = 4 << 20
_ALIGN_BYTES = 64


class ReadableState(Protocol):
    """A state whose tensors can be read in pieces: a `StoredState`, or several checkpoints that are merged."""

    buffer_bytes: int
    """The most that buffers of a read take."""

    def entry(self, key: str) -> Tensor:
        """Return a tensor's dtype and shape."""

    def fill_boxes(self, wanted: Sequence[tuple[str, Box, torch.Tensor]]) -> None:
        """Read boxes of tensors, each into memory of its shape and dtype."""


def stream_tensors(stored: ReadableState, keys: Iterable[str]) -> Iterator[tuple[str, memoryview]]:
    """Yield each tensor's bytes in order, as it is when contiguous, in one piece or several: (key, bytes).

    A piece is valid until the next one is taken. A tensor without elements comes as one empty piece. Every block is
    checked as it is read. Raises CheckpointDamaged.
    """
    wanted = list(keys)
    sizes = [stored.entry(key).size_bytes for key in wanted]
    total_bytes, largest = sum(sizes), max(sizes, default=0)
    batch_bytes = min(BATCH_BYTES, max(_LEAST_BYTES, largest))
    stored.buffer_bytes = batch_bytes
    buffer = torch.empty(batch_bytes, dtype=torch.uint8, device="cpu")
    stretches = (
        (key, start, min(batch_bytes, size_bytes - start))
        for key, size_bytes in zip(wanted, sizes, strict=True)
        for start in range(0, max(size_bytes, 1), batch_bytes)
    )
    for batch in grouped(stretches, lambda stretch: _aligned(stretch[2]), batch_bytes):
        parts = []
        at = 0
        for key, start, size_bytes in batch:
            parts.append((key, start, buffer[at : at + size_bytes]))
            at += _aligned(size_bytes)
        pieces = (
            (key, piece) for key, start, memory in parts for piece in boxes_of_stretch(stored, key, start, memory)
        )
        stored.fill_boxes([(key, *piece) for key, piece in pieces])
        for key, _, memory in parts:
            yield key, view_of(memory)
            if is_heard(BytesMoved):
                emit(BytesMoved(key=key, size_bytes=len(memory), total_bytes=total_bytes))


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGN_BYTES) * _ALIGN_BYTES


def boxes_of_stretch(stored: ReadableState, key: str, start: int, memory: torch.Tensor) -> list[Piece]:
    """Divide memory for the bytes of a tensor from `start` on into boxes of the tensor."""
    entry = stored.entry(key)
    dtype = entry.torch_dtype
    elements = memory.view(dtype)
    first = start // dtype.itemsize
    pieces, done = [], 0
    for box in boxes_of_range(entry.shape, first, first + elements.numel()) if prod(entry.shape) else ():
        pieces.append(Piece(box, elements[done : done + box.volume].view(box.sizes)))
        done += box.volume
    return pieces


def close_off(file: IO[bytes], *, durable: bool) -> None:
    """Flush a file, and sync it to the disk if `durable`."""
    file.flush()
    if durable:
        os.fsync(file.fileno())
