"""Tensors of this process that have memory in common. Arithmetic on addresses, sizes and strides; reads no numbers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from math import gcd
from typing import Any, NamedTuple

import numpy as np
import torch

from ckptstore.state.tensors.placement import PLAIN_TYPES


class Pair(NamedTuple):
    """Two tensors, by their places in a list, the first one earlier, that have an element's memory in common."""

    first: int
    second: int
    is_same: bool
    """True if the two are one: `identity_of` is equal."""


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
        if tensor.numel() and not tensor.is_meta and (address := first_byte(tensor)):
            by_device[tensor.device].append(_Extent(address, address + reach_bytes(tensor), number))
    for extents in by_device.values():
        extents.sort()
        cluster: list[_Extent] = []
        stop = 0
        for extent in extents:
            if cluster and extent.start >= stop:
                yield from _within(cluster, tensors)
                cluster = []
            cluster.append(extent)
            stop = max(stop, extent.stop)
        yield from _within(cluster, tensors)


def first_byte(tensor: torch.Tensor) -> int:
    """Return the address of a plain strided tensor's first element; 0 where it has no memory."""
    return tensor.data_ptr()


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
    return _units(memory, first_byte(tensor) - start, tensor, 1)


class _Extent(NamedTuple):
    start: int
    stop: int
    """The address behind the last byte."""
    number: int


def _within(cluster: list[_Extent], tensors: Sequence[torch.Tensor]) -> Iterator[Pair]:
    """Yield the pairs among tensors whose extents form one stretch."""
    if len(cluster) < 2:
        return
    firsts: dict[Hashable, int] = {}
    distinct = []
    for extent in sorted(cluster, key=lambda extent: extent.number):
        first = firsts.setdefault(identity_of(tensors[extent.number]), extent.number)
        if first == extent.number:
            distinct.append(extent)
        else:
            yield Pair(first, extent.number, is_same=True)
    if len(distinct) < 2:
        return
    if all(_is_dense(extent, tensors[extent.number]) for extent in distinct):
        yield from _of_intervals(distinct)
    else:
        yield from _of_elements(distinct, tensors)


def _is_dense(extent: _Extent, tensor: torch.Tensor) -> bool:
    return extent.stop - extent.start == tensor.numel() * tensor.element_size()


def _of_intervals(extents: list[_Extent]) -> Iterator[Pair]:
    """Yield the pairs of tensors without gaps: all those whose extents meet."""
    open_ones: list[_Extent] = []
    for extent in sorted(extents):
        open_ones = [other for other in open_ones if other.stop > extent.start]
        for other in open_ones:
            first, second = sorted((other.number, extent.number))
            yield Pair(first, second, is_same=False)
        open_ones.append(extent)


def _of_elements(extents: list[_Extent], tensors: Sequence[torch.Tensor]) -> Iterator[Pair]:
    """Yield the pairs of tensors that may lie in each other's gaps: each writes its number to a map of the memory."""
    start, stop = min(extent.start for extent in extents), max(extent.stop for extent in extents)
    unit = gcd(*(length for extent in extents for length in _lengths(extent.start - start, tensors[extent.number])))
    owners = np.zeros((stop - start) // unit, np.int32)
    for place, extent in enumerate(extents, 1):
        view = _units(owners, extent.start - start, tensors[extent.number], unit)
        for other in np.unique(view):
            if other:
                yield Pair(extents[other - 1].number, extent.number, is_same=False)
        view[...] = place


def _lengths(offset_bytes: int, tensor: torch.Tensor) -> list[int]:
    """Return all lengths in bytes that the places of a tensor's elements are made of."""
    size = tensor.element_size()
    return [offset_bytes, size, *(step * size for step in tensor.stride())]


def _units(memory: np.ndarray[Any, Any], offset_bytes: int, tensor: torch.Tensor, unit: int) -> np.ndarray[Any, Any]:
    """Return the items of an array, one for each `unit` bytes, that stand for the elements of a tensor."""
    size = tensor.element_size()
    strides = [step * size // unit * memory.itemsize for step in tensor.stride()]
    return np.lib.stride_tricks.as_strided(
        memory[offset_bytes // unit :], (*tensor.shape, size // unit), (*strides, memory.itemsize)
    )
