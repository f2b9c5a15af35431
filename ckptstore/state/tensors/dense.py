"""Tensors whose bytes lie in host memory as they are to be stored. One look at such a tensor says all about it.

Most tensors are. With thousands of small ones, looking again in each step costs more than moving their bytes.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import torch

from ckptstore.state.tensors.boxes import Box, Sizes, whole
from ckptstore.state.tensors.placement import PLAIN_TYPES, name_of


@dataclass(frozen=True, slots=True)
class Form:
    """The properties that all dense tensors of one dtype and shape have in common."""

    dtype: str
    """torch's name, without the module."""
    shape: Sizes
    boxes: tuple[Box, ...]
    """The box that is the whole tensor."""
    size_bytes: int


class Dense(NamedTuple):
    """The memory of a dense tensor."""

    address: int
    form: Form

    def is_held_by(self, tensor: torch.Tensor) -> bool:
        """Return True if the tensor still has this memory, and the memory has room for all of it."""
        end_bytes = tensor.storage_offset() * tensor.element_size() + self.form.size_bytes
        return tensor.data_ptr() == self.address and end_bytes <= tensor.untyped_storage().nbytes()


@lru_cache(maxsize=65_536)
def _form(dtype: torch.dtype, shape: Sizes) -> Form | None:
    name, sizes = name_of(dtype), tuple(shape)
    if dtype.is_complex or name.startswith("q"):  # it may be shown conjugated, or is quantised
        return None
    return Form(name, sizes, (whole(sizes),), prod(sizes) * dtype.itemsize)


def dense_of(tensor: torch.Tensor) -> Dense | None:
    """Return the memory of a tensor; None for one that is not plain, strided, contiguous and in host memory, has no
    element or no memory, or may be shown conjugated or negated: such a tensor needs a closer look."""
    if type(tensor) not in PLAIN_TYPES or tensor.layout is not torch.strided or tensor.is_nested:
        return None
    if not (tensor.is_cpu and tensor.is_contiguous()) or tensor.is_neg():
        return None
    form, address = _form(tensor.dtype, tensor.shape), tensor.data_ptr()
    return Dense(address, form) if address and form is not None else None


_move: Any = ctypes.PyDLL(None).memmove  # keeps the interpreter lock: handing it over takes longer than a small copy
_move.argtypes, _move.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t), None


def address_of_view(view: memoryview) -> int:
    """Return the address of the first byte of writable memory."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def copy_bytes(targets: Iterable[int], sources: Iterable[int | bytes], sizes_bytes: Iterable[int]) -> None:
    """Copy to each address so many bytes, from an address or out of `bytes`. For small copies; the caller keeps all the
    memory."""
    deque(map(_move, targets, sources, sizes_bytes), maxlen=0)
