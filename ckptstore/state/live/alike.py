"""Comparison of values to the last bit: by their exact types, and with NaN like NaN."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import is_
from typing import Any

import numpy as np
import torch

from ckptstore.runtime.torch_private import metadata_of
from ckptstore.state.live.flatten import Replicated, TensorRef

_TENSORS = (torch.Tensor, Replicated, TensorRef)


def alike(one: Any, other: Any, tensors: Callable[[Any, Any], bool] = is_) -> bool:
    """Return True if two values are the same, in their order and with their exact types.

    `tensors` compares tensors, or references to them, of one type; by default they must be the same objects.
    """
    if type(one) is not type(other):
        return False
    if isinstance(one, _TENSORS):
        return tensors(one, other)
    if isinstance(one, Mapping):
        if not alike(metadata_of(one), metadata_of(other), tensors):
            return False
        one, other = list(one.items()), list(other.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(alike(*pair, tensors) for pair in zip(one, other, strict=True))
    if isinstance(one, float | complex):
        return repr(one) == repr(other)  # NaN is not equal to itself, and -0.0 is to 0.0
    if isinstance(one, np.ndarray):
        return (one.dtype, one.shape) == (other.dtype, other.shape) and one.tobytes() == other.tobytes()
    try:
        return bool(one == other)
    except Exception:  # a class of the user's may compare in its own way
        return False
