"""Casts of a load: a number may be rounded, and nothing else may happen to it."""

from __future__ import annotations

import torch

from ckptstore.errors import InvalidState, StateMismatch
from ckptstore.state.tensors.overlap import local_memory
from ckptstore.state.tensors.placement import name_of
from ckptstore.state.tensors.segments import check_range

_PIECE_ELEMENTS = 1 << 22
"""The most elements that are looked at together: in float64 they take 32 MiB."""
WITHOUT_SIGN = ("float8_e8m0fnu", "float4_e2m1fn_x2")


def check_cast(key: str, saved: torch.Tensor, dtype: torch.dtype) -> None:
    """Raise StateMismatch if a tensor that was saved has a number that another dtype cannot hold.

    Between floating-point dtypes numbers are rounded, and none may become infinite. All other casts must be exact, and
    those to a dtype without a sign.
    """
    is_rounded = saved.dtype.is_floating_point and dtype.is_floating_point and name_of(dtype) not in WITHOUT_SIGN
    for part in local_memory(saved):
        for piece in part.detach().reshape(-1).split(_PIECE_ELEMENTS):
            try:
                made = piece.to(dtype)
                if is_rounded:
                    check_range(key, piece, made)
                else:
                    _check_exact(key, piece, made)
            except (InvalidState, NotImplementedError) as error:
                raise StateMismatch(
                    f"{key} is {name_of(saved.dtype)} in the checkpoint and {name_of(dtype)} in the state, "
                    f"which cannot hold all of its numbers: {getattr(error, 'message', error)}",
                    hint=f"Load it into {name_of(saved.dtype)}",
                ) from None


def _check_exact(key: str, piece: torch.Tensor, made: torch.Tensor) -> None:
    again = made.to(piece.dtype)
    lost = (again != piece) & ~(again.isnan() & piece.isnan())
    if lost.any():
        raise InvalidState(f"{key} has the number {piece[lost][0].item()}, which would be {made[lost][0].item()}")
