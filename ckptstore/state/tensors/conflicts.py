"""Stored tensors for the same memory: find those that need not be read, and those to compare."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from ckptstore.state.tensors.boxes import Box
from ckptstore.state.tensors.loaded import is_dtensor
from ckptstore.state.tensors.overlap import shared_memory
from ckptstore.state.tensors.placement import PLAIN_TYPES, pieces_of


class PlacedTensor(NamedTuple):
    """A tensor of the state, plain or distributed, that a stored tensor fills."""

    key: str
    """The key in the state."""
    tensor: torch.Tensor
    source: str
    """The key of the stored tensor."""
    saved_dtype: torch.dtype
    live: torch.Tensor | None = None
    """The parameter or buffer whose memory it is in the end, where `tensor` is a copy of it."""
    may_move: bool = False
    """True if a new tensor may be filled in its place."""


class FilledBox(NamedTuple):
    """A box of a stored tensor, and the memory that it fills."""

    place: PlacedTensor
    box: Box
    memory: torch.Tensor
    """The memory, in the shape of the box and the dtype of the state; the whole `live` if there is one."""


class Conflict(NamedTuple):
    """Two stored boxes for the same memory, which can hold both only if they agree."""

    first: FilledBox
    second: FilledBox
    is_same: bool
    """True if both are for all of the memory, element by element; else they have some elements in common."""


class Conflicts(NamedTuple):
    """The conflicts and the copies that follow from the memory of places."""

    conflicts: list[Conflict]
    """The boxes to compare before anything is filled."""
    copies: list[PlacedTensor]
    """Places that are filled when others are, because all of their memory is the memory of earlier ones."""


def local_memory(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the plain tensors in which this process has its part of a plain or distributed tensor. Yield none for other
    subclasses, whose memory is unknown."""
    local = tensor._local_tensor if is_dtensor(tensor) else tensor
    shards = getattr(local, "local_shards", None) if type(local) not in PLAIN_TYPES else None
    parts = [local] if shards is None else [getattr(shard, "tensor", shard) for shard in shards()]
    yield from (part for part in parts if type(part) in PLAIN_TYPES)


def conflicts_of(places: Sequence[PlacedTensor]) -> Conflicts:
    """Find the places that have memory in common. No place may overlap itself.

    Sort all places, and look closer only at those that share memory.
    """
    owners, memory = [], []
    for number, place in enumerate(places):
        for part in local_memory(place.tensor if place.live is None else place.live):
            owners.append(number)
            memory.append(part)
    involved = {owners[number] for pair in shared_memory(memory) for number in pair[:2]}
    if not involved:
        return Conflicts([], [])
    held = [item for number in sorted(involved) for item in _held(places[number])]
    conflicts, copied = [], Counter[int]()
    for pair in shared_memory([item.memory for item in held]):
        first, second = held[pair.first], held[pair.second]
        if not pair.is_same or _what(first) != _what(second):
            conflicts.append(Conflict(first, second, pair.is_same))
        if pair.is_same and first.place.live is None:
            copied[id(second.place)] += 1
    parts = Counter(id(item.place) for item in held)
    copies = [place for place in places if place.live is None and 0 < parts[id(place)] == copied[id(place)]]
    return Conflicts(conflicts, copies)


def _held(place: PlacedTensor) -> Iterator[FilledBox]:
    for box, memory in pieces_of(place.tensor, place.key):
        kept = memory if place.live is None else place.live
        if type(kept) in PLAIN_TYPES:
            yield FilledBox(place, box, kept)


def _what(item: FilledBox) -> tuple[str, Box]:
    return item.place.source, item.box
