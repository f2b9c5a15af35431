"""The memory of a tensor: a check that its numbers lie there as they are stored, and a view of them."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.nn.parameter import is_lazy

from ckptstore.errors import InvalidState
from ckptstore.format.digest import fingerprinter
from ckptstore.state.tensors.placement import PLAIN_TYPES, is_dtensor


@contextmanager
def outside_inference() -> Iterator[None]:
    """Make ordinary tensors, also if the caller is in inference mode; a decorator too. The recording of gradients stays
    on or off as it is."""
    records_gradients = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(records_gradients):
        yield


def obstacle_of(tensor: torch.Tensor) -> tuple[str, str] | None:
    """Return why a tensor of this kind is neither stored nor loaded into, as words that follow "is", and what to do;
    None if it has its numbers in a dense array, or in other tensors that do. Look at the kind alone, not at shape or
    memory."""
    if is_dtensor(tensor):
        tensor = tensor._local_tensor
    if type(tensor) not in PLAIN_TYPES:
        if is_lazy(tensor):
            return ("lazy: it has no shape before its module is first called", "Call the module once before")
        if hasattr(tensor, "local_shards"):  # any other attribute of which raises
            return None
    if tensor.is_nested:
        return ("a nested tensor", "Use its values and offsets, or torch.nested.to_padded_tensor")
    if tensor.is_quantized:
        return ("a quantised tensor of torch.ao", "Use its int_repr(), scale and zero point, or a torchao tensor")
    if tensor.layout is not torch.strided:
        name = str(tensor.layout).removeprefix("torch.").removeprefix("_")
        return (f"a tensor with the layout {name}", "Use to_dense(), or the dense tensors that it is made of")
    return None


def check_memory(tensor: torch.Tensor, key: str) -> None:
    """Raise InvalidState unless a tensor that is read or written by its address has memory there for all its elements.

    Some subclasses keep their elements elsewhere, and a tensor may have had its memory taken away.
    """
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise InvalidState(f"{key} has the layout {tensor.layout}", hint="Store a dense tensor")
    if not tensor.numel():
        return
    try:
        if type(tensor) in PLAIN_TYPES:
            has_memory = bool(tensor.data_ptr())
        else:
            last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
            end_bytes = (tensor.storage_offset() + last + 1) * tensor.element_size()
            has_memory = bool(tensor.data_ptr()) and tensor.untyped_storage().nbytes() >= end_bytes
    except (RuntimeError, NotImplementedError):  # torch says of some that they have no storage
        has_memory = False
    if not has_memory:
        raise InvalidState(
            f"{key} is a {type(tensor).__name__} that has no memory of its own for its numbers",
            hint="Store the tensors that have them, or give the class __tensor_flatten__",
        )


def is_plain_memory(tensor: torch.Tensor) -> bool:
    """Return True if the bytes of a tensor lie in this process's memory, one after another, as they are to be
    stored."""
    if type(tensor) not in PLAIN_TYPES and not tensor.data_ptr():
        return False  # a subclass that keeps them elsewhere
    return tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def address_of(tensor: torch.Tensor, size_bytes: int) -> int:
    """Return the address at which the memory of a tensor of `size_bytes` begins, for which `is_plain_memory` holds.
    Raises InvalidState when the memory has been freed."""
    address = tensor.data_ptr()
    end_bytes = tensor.storage_offset() * tensor.element_size() + size_bytes
    if not address or end_bytes > tensor.untyped_storage().nbytes():
        raise InvalidState("a tensor's memory has been given back, or is smaller than the tensor")
    return address


def view_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a tensor for which `is_plain_memory` holds. It does not keep the tensor alive."""
    size_bytes = tensor.numel() * tensor.element_size()
    if not size_bytes:
        return memoryview(b"")
    return memoryview((ctypes.c_char * size_bytes).from_address(address_of(tensor, size_bytes))).cast("B")


def bytes_of(tensor: torch.Tensor) -> memoryview | bytes:
    """Return the bytes of any small tensor: its memory, or a copy of it."""
    if is_plain_memory(tensor):
        return view_of(tensor)
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return bytes(view_of(plain))


def digest_of(tensor: torch.Tensor) -> str:
    """Return the fingerprint of a tensor's dtype, shape and bytes, as they are stored."""
    if not is_plain_memory(tensor):
        tensor = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    hasher = fingerprinter(f"{tensor.dtype} {tuple(tensor.shape)} ".encode())
    hasher.update(view_of(tensor))
    return hasher.hexdigest()
