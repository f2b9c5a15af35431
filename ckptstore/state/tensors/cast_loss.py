"""Find what a cast of a tensor loses. Rounding is what a cast is for; all else is an error wherever ckptstore casts."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ckptstore.errors import InvalidState, StateMismatch
from ckptstore.state.tensors.overlap import local_memory
from ckptstore.state.tensors.placement import name_of

_CHUNK_ELEMENTS = 1 << 20
"""The elements that are looked at together: each takes some 20 bytes meanwhile."""


def check_cast(key: str, tensor: torch.Tensor, made: torch.Tensor, *, hint: str | None = None) -> None:
    """Raise InvalidState if `made`, which is a tensor in another dtype, has lost a value of it; see `lost_in_cast`."""
    is_large_float = made.is_floating_point() and made.dtype.itemsize > 1 and tensor.is_floating_point()
    if not made.numel() or (is_large_float and all(map(torch.isfinite, made.aminmax()))):  # a NaN fails it
        return
    for was, stored in _chunks(tensor.detach(), made):
        lost = lost_in_cast(was, stored)
        if lost.any():
            raise InvalidState(f"{key} has {_shown(was[lost][0])}, which {name_of(made.dtype)} cannot hold", hint=hint)


def check_load_cast(key: str, saved: torch.Tensor, dtype: torch.dtype) -> None:
    """Raise StateMismatch if a tensor that was saved, whole or in part, has a value that a dtype cannot hold."""
    for part in local_memory(saved):
        for piece in torch.split(part.detach().reshape(-1), _CHUNK_ELEMENTS):
            try:
                check_cast(key, piece, piece.to(dtype))
            except (InvalidState, NotImplementedError) as error:
                raise StateMismatch(
                    f"{key} is {name_of(saved.dtype)} in the checkpoint and {name_of(dtype)} in the state, "
                    f"which cannot hold all of its numbers: {getattr(error, 'message', error)}",
                    hint=f"Load it into {name_of(saved.dtype)}",
                ) from None


def lost_in_cast(tensor: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
    """Return a mask of the elements whose value a cast has not only rounded.

    A number beyond the largest one of the dtype is lost, whether it became infinite, NaN, another number or the largest
    one. So is an infinity or NaN that became something else, a sign, an imaginary part and, for whole numbers, a
    fraction.
    """
    tensor, made = tensor.cpu(), made.cpu()
    if tensor.is_complex():
        if not made.is_complex():
            return (tensor.imag != 0) | lost_in_cast(tensor.real, made)
        return lost_in_cast(torch.view_as_real(tensor), torch.view_as_real(made)).any(-1)
    if made.is_complex():
        return (made.imag != 0) | lost_in_cast(tensor, made.real)
    was, stored = tensor.double(), made.double()
    if not made.is_floating_point():
        lost = was != stored  # a NaN equals nothing
        if made.dtype != torch.bool:
            most = torch.iinfo(made.dtype).max
            lost |= was >= float(most + 1)  # for a double the largest 64-bit numbers are the next one
            if not tensor.is_floating_point():
                lost = (tensor.to(torch.int64) != made.to(torch.int64)) | ((was < 0) != (stored < 0))
        return lost
    lost = (was.isfinite() != stored.isfinite()) | (was.isnan() != stored.isnan())
    lost |= was * stored.sign() < 0
    if made.dtype.itemsize == 1:  # which may end at the largest number
        lost |= was.isfinite() & (was.abs() > torch.finfo(made.dtype).max)
    return lost


def _chunks(tensor: torch.Tensor, made: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    if tensor.numel() <= _CHUNK_ELEMENTS or not tensor.dim():
        yield tensor, made
        return
    if tensor[0].numel() > _CHUNK_ELEMENTS:
        for was, stored in zip(tensor, made, strict=True):
            yield from _chunks(was, stored)
        return
    rows = max(1, _CHUNK_ELEMENTS // max(1, tensor[0].numel()))
    yield from zip(torch.split(tensor, rows), torch.split(made, rows), strict=True)


def _shown(value: torch.Tensor) -> str:
    number = value.item()
    return f"the number {number:.6g}" if isinstance(number, float) else f"the value {number}"
