"""Tensors of this process that have memory in common. Arithmetic on addresses, sizes and strides; reads no numbers."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Sequence
from math import gcd
from typing import Any, NamedTuple

import numpy as np
import torch

from ckptstore.state.tensors.boxes import Box
from ckptstore.state.tensors.dense import Dense
from ckptstore.state.tensors.placement import PLAIN_TYPES, is_dtensor, pieces_of

Pair = tuple[int, int, bool]
"""The places of two tensors in a list, the earlier one first, and True if they are one: `identity_of` is equal."""
_Extent = tuple[int, int, int]
"""The address of a tensor's first byte, the one behind its last byte, and its place in a list."""


def identity_of(tensor: torch.Tensor) -> Hashable:
    """Return a value that is equal for two tensors exactly if they show the same numbers in the same memory, whatever
    is written to it.

    It has device, address, dtype, sizes, strides, and whether the numbers are shown conjugated or negated. Any tensor
    that is not plain and dense with memory (distributed, wrapped, sparse, empty, meta, freed) is compared as an object:
    so all ranks find the same ties, those with an empty shard too.
    """
    if type(tensor) not in PLAIN_TYPES or tensor.layout is not torch.strided:
        return id(tensor)
    if tensor.is_nested or tensor.is_quantized or tensor.is_meta or not tensor.numel():
        return id(tensor)
    address = tensor.data_ptr()
    if not address:
        return id(tensor)
    shape, strides = tensor.shape, tensor.stride()
    if 1 in shape:  # the stride of a dimension of size 1 moves nothing
        strides = tuple([0 if size == 1 else step for size, step in zip(shape, strides, strict=True)])
    return tensor.device, address, tensor.dtype, shape, strides, tensor.is_conj(), tensor.is_neg()


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Return True if two elements of a strided tensor lie in the same memory, as after `expand`.

    Takes eight bytes of memory for each element, in the rare case that the strides alone do not decide.
    """
    if tensor.is_contiguous() or not tensor.numel():
        return False
    dims = sorted(
        (step, size) for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size > 1
    )  # from the innermost one
    reach = 0
    for step, size in dims:
        if step <= reach:
            break
        reach += step * (size - 1)
    else:
        return False
    if dims[0][0] == 0:
        return True
    places = np.zeros(1, np.int64)
    for step, size in dims:
        places = np.add.outer(places, np.arange(size) * step).reshape(-1)
    return len(np.unique(places)) < len(places)


def shared_memory(tensors: Sequence[torch.Tensor]) -> Iterator[Pair]:
    """Yield pairs of plain strided tensors that have memory in common. No tensor may overlap itself.

    Every tensor that shares memory with an earlier one is the second of a pair. Where several tensors hold the same
    element, each is paired with the nearest earlier one that does, not with every other. Takes time for sorting, and
    memory as large as the tensors where strided ones lie in each other's gaps.
    """
    by_device: defaultdict[torch.device, list[_Extent]] = defaultdict(list)
    for number, tensor in enumerate(tensors):
        if tensor.numel() and not tensor.is_meta and (address := tensor.data_ptr()):
            by_device[tensor.device].append((address, address + reach_bytes(tensor), number))
    for extents in by_device.values():
        extents.sort()
        cluster: list[_Extent] = []
        stop = 0
        for extent in extents:
            if cluster and extent[0] >= stop:
                yield from _within(cluster, tensors)
                cluster = []
            cluster.append(extent)
            stop = max(stop, extent[1])
        yield from _within(cluster, tensors)


def reach_bytes(tensor: torch.Tensor) -> int:
    """Return the number of bytes from the start of a tensor's first element to the end of its last one."""
    if tensor.is_contiguous():
        return tensor.numel() * tensor.element_size()
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def place_bytes(memory: np.ndarray[Any, Any], start: int, tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return a view of the items of a flat array that stand for the bytes of a tensor. The array's first item stands
    for the address `start`. The view has the shape of the tensor and one more dimension, for the bytes of an
    element."""
    return _units(memory, tensor.data_ptr() - start, tensor, 1)


def _within(cluster: list[_Extent], tensors: Sequence[torch.Tensor]) -> Iterator[Pair]:
    """Yield the pairs among tensors whose extents form one stretch."""
    if len(cluster) < 2:
        return
    firsts: dict[Hashable, int] = {}
    distinct = []
    for extent in sorted(cluster, key=lambda extent: extent[2]):
        number = extent[2]
        first = firsts.setdefault(identity_of(tensors[number]), number)
        if first == number:
            distinct.append(extent)
        else:
            yield first, number, True
    if len(distinct) < 2:
        return
    if all(stop - start == tensors[number].nbytes for start, stop, number in distinct):
        yield from _of_intervals(distinct)
    else:
        yield from _of_elements(distinct, tensors)


def _of_intervals(extents: list[_Extent]) -> Iterator[Pair]:
    """Yield the pairs of tensors without gaps: all those whose extents meet."""
    open_ones: list[tuple[int, int]] = []
    for start, stop, number in sorted(extents):
        open_ones = [other for other in open_ones if other[0] > start]
        for _, other in open_ones:
            yield min(other, number), max(other, number), False
        open_ones.append((stop, number))


def _of_elements(extents: list[_Extent], tensors: Sequence[torch.Tensor]) -> Iterator[Pair]:
    """Yield the pairs of tensors that may lie in each other's gaps: each writes its number to a map of the memory."""
    low, high = min(start for start, _, _ in extents), max(stop for _, stop, _ in extents)
    unit = 0  # the greatest common divisor of all lengths in bytes that the places of elements are made of
    for start, _, number in extents:
        size = tensors[number].element_size()
        unit = gcd(unit, start - low, size, *(step * size for step in tensors[number].stride()))
    owners = np.zeros((high - low) // unit, np.int32)
    for place, (start, _, number) in enumerate(extents, 1):
        view = _units(owners, start - low, tensors[number], unit)
        for other in np.unique(view):
            if other:
                yield extents[other - 1][2], number, False
        view[...] = place


def _units(memory: np.ndarray[Any, Any], offset_bytes: int, tensor: torch.Tensor, unit: int) -> np.ndarray[Any, Any]:
    """Return the items of an array, one for each `unit` bytes, that stand for the elements of a tensor."""
    size = tensor.element_size()
    strides = [step * size // unit * memory.itemsize for step in tensor.stride()]
    return np.lib.stride_tricks.as_strided(
        memory[offset_bytes // unit :], (*tensor.shape, size // unit), (*strides, memory.itemsize)
    )


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
    dense: Dense | None = None
    """The memory of `tensor`, where it is dense."""


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
    reason: str = ""
    """The reason to give if they differ; empty where it is their memory in the state."""


def local_memory(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the plain tensors in which this process has its part of a plain or distributed tensor; none for other
    subclasses, whose memory is unknown."""
    if type(tensor) in PLAIN_TYPES:
        return [tensor]
    local = tensor._local_tensor if is_dtensor(tensor) else tensor
    shards = getattr(local, "local_shards", None) if type(local) not in PLAIN_TYPES else None
    parts = [local] if shards is None else [getattr(shard, "tensor", shard) for shard in shards()]
    return [part for part in parts if type(part) in PLAIN_TYPES]


def conflicts_of(places: Sequence[PlacedTensor]) -> tuple[list[Conflict], list[PlacedTensor]]:
    """Return the boxes to compare before anything is filled, and the places that are filled when others are, because
    all of their memory is the memory of earlier ones. No place may overlap itself.

    Sort all places, and look closer only at those that share memory.
    """
    if _share_nothing(places):
        return [], []
    owners, memory = [], []
    for number, place in enumerate(places):
        for part in local_memory(place.tensor if place.live is None else place.live):
            owners.append(number)
            memory.append(part)
    involved = {owners[number] for pair in shared_memory(memory) for number in pair[:2]}
    if not involved:
        return [], []
    held = [item for number in sorted(involved) for item in _filled(places[number])]
    conflicts, copied = [], Counter[int]()
    for earlier, later, is_same in shared_memory([item.memory for item in held]):
        first, second = held[earlier], held[later]
        if not is_same or (first.place.source, first.box) != (second.place.source, second.box):
            conflicts.append(Conflict(first, second, is_same))
        if is_same and first.place.live is None:
            copied[id(second.place)] += 1
    parts = Counter(id(item.place) for item in held)
    return conflicts, [place for place in places if place.live is None and 0 < parts[id(place)] == copied[id(place)]]


def _share_nothing(places: Sequence[PlacedTensor]) -> bool:
    """Return True if it is plain that no two places have memory in common, as a rule; all of them are looked at
    together."""
    starts, stops, others = [], [], list[torch.Tensor]()
    for place in places:
        if place.live is None and place.dense is not None:
            starts.append(place.dense.address)
            stops.append(place.dense.address + place.dense.form.size_bytes)
        else:
            others += local_memory(place.tensor if place.live is None else place.live)
    for tensor in others:
        if tensor.is_cpu and tensor.numel() and (address := tensor.data_ptr()):
            starts.append(address)
            stops.append(address + reach_bytes(tensor))
    order = np.argsort(np.array(starts, np.int64))
    is_apart = np.array(stops, np.int64)[order][:-1] <= np.array(starts, np.int64)[order][1:]
    return bool(is_apart.all()) and not any(True for _ in shared_memory([one for one in others if not one.is_cpu]))


def _filled(place: PlacedTensor) -> Iterator[FilledBox]:
    for box, memory in pieces_of(place.tensor, place.key):
        kept = memory if place.live is None else place.live
        if type(kept) in PLAIN_TYPES:
            yield FilledBox(place, box, kept)
