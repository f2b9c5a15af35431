"""Add up tensors of several checkpoints, some elements at a time, in memory that is used again."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate

import torch

from ckptstore.runtime.new_memory import new_memory
from ckptstore.state.tensors.cast_loss import lost_in_cast

CHUNK_ELEMENTS = 1 << 15
"""The elements that are calculated with at once: they stay in the processor's cache, and torch does not share so few
among threads, which would wait for each other."""
_ALIGN_BYTES = 64


class SumMemory:
    """Memory that one call after another divides: what each thread allocated anew would stay with its heap."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")

    def divided(self, forms: Sequence[tuple[Sequence[int], torch.dtype]]) -> list[torch.Tensor]:
        """Return a tensor for each shape and dtype, valid until the next call."""
        counts = [math.prod(sizes) * dtype.itemsize for sizes, dtype in forms]
        *starts, end = accumulate((-(-count // _ALIGN_BYTES) * _ALIGN_BYTES for count in counts), initial=0)
        if end > len(self._memory):
            self._memory = torch.frombuffer(new_memory(end), dtype=torch.uint8)
        return [
            self._memory[start : start + count].view(dtype).view(sizes)
            for start, count, (sizes, dtype) in zip(starts, counts, forms, strict=True)
        ]


class SumMemories:
    """Lends two scratch memories to each of the threads that add up at once."""

    def __init__(self) -> None:
        self._unused: list[tuple[SumMemory, SumMemory]] = []

    @contextmanager
    def lent(self) -> Iterator[tuple[SumMemory, SumMemory]]:
        """Lend two memories until the context ends."""
        try:
            pair = self._unused.pop()
        except IndexError:
            pair = SumMemory(), SumMemory()
        yield pair
        self._unused.append(pair)


def chunks_of(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the elements of a contiguous tensor, some at a time."""
    return tensor.view(-1).unsafe_split(CHUNK_ELEMENTS)


def add_terms(total: torch.Tensor, terms: Sequence[tuple[float, torch.Tensor]], *, is_first: bool) -> None:
    """Add elements of checkpoints times their coefficients; the first ones take the place of what is there."""
    if is_first and not terms:
        total.zero_()
    widened = total.new_empty(CHUNK_ELEMENTS)
    for sums, *several in zip(chunks_of(total), *(chunks_of(part) for _, part in terms), strict=True):
        replaces = is_first
        for (coefficient, _), elements in zip(terms, several, strict=True):
            if replaces:
                sums.copy_(elements).mul_(coefficient)
                replaces = False
            else:
                wide = elements if elements.dtype == sums.dtype else widened[: elements.shape[0]].copy_(elements)
                sums.add_(wide, alpha=coefficient)


def narrow_to(total: torch.Tensor, memory: torch.Tensor) -> bool:
    """Copy sums into memory of their final dtype. Return False if it may not hold one of them."""
    limits = torch.finfo(memory.dtype)
    pairs = list(zip(chunks_of(memory), chunks_of(total), strict=True))
    ends = _real(total).new_zeros((2, len(pairs)))
    for (narrow, wide), low, high in zip(pairs, *(row.unbind() for row in ends), strict=True):
        narrow.copy_(wide)
        torch.aminmax(_real(wide), out=(low, high))  # both are NaN if one element is
    return bool((ends[0] >= min(limits.min, 0.0)).all() and (ends[1] <= limits.max).all())


def has_lost(total: torch.Tensor, memory: torch.Tensor) -> bool:
    """Return True if `narrow_to` has not only rounded a sum."""
    return any(
        bool(lost_in_cast(wide, narrow).any()) for narrow, wide in zip(chunks_of(memory), chunks_of(total), strict=True)
    )


def _real(elements: torch.Tensor) -> torch.Tensor:
    """Return elements as real numbers, two for each complex one."""
    return torch.view_as_real(elements) if elements.is_complex() else elements
