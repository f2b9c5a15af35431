"""Recognition of the states of random number generators: those of torch, Python and numpy, under any key."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ckptstore.state.index.part import Tensor
from ckptstore.state.live.flatten import TensorRef, children

_NAMED = re.compile(r"(?<![a-z])(p?rng|random)(?![a-z])", re.IGNORECASE)
_NAMED_LESS_SURELY = re.compile(r"generator|cuda|accelerator|xpu|mps|seed", re.IGNORECASE)
_MERSENNE_TWISTER_BYTES = 5056
"""The size of the state of torch's generator on the host."""
_SMALL_BYTES = (16, 24, 32, 44)
"""The sizes of those on accelerators."""
_MERSENNE_TWISTER_WORDS = (624, 625)


def holds_random_state(key: str, tensors: Mapping[str, Tensor], value: Any = None) -> bool:
    """Return True if a key names random numbers, or if its tensor or a part of its value looks like a generator's
    state."""
    if _NAMED.search(key) is not None:
        return True
    if isinstance(value, TensorRef):
        return _is_torchs(key, tensors.get(value.key))
    if value is None:
        return _is_torchs(key, tensors.get(key))
    if isinstance(value, Mapping) and "bit_generator" in value:
        return True
    if isinstance(value, list | tuple) and _is_listed(value):
        return True
    return any(holds_random_state(f"{key}.{part}", tensors, item) for part, item in children(value) if item is not None)


def _is_torchs(key: str, tensor: Tensor | None) -> bool:
    if tensor is None or tensor.dtype != "uint8" or len(tensor.shape) != 1:
        return False
    size_bytes = tensor.shape[0]
    is_small = size_bytes in _SMALL_BYTES and _NAMED_LESS_SURELY.search(key) is not None
    return size_bytes == _MERSENNE_TWISTER_BYTES or is_small


def _is_listed(value: list[Any] | tuple[Any, ...]) -> bool:
    """Return True for the result of `random.getstate()`, and of the older form of numpy's."""
    if len(value) == 3:
        return isinstance(value[1], list | tuple) and len(value[1]) in _MERSENNE_TWISTER_WORDS
    return len(value) == 5 and value[0] == "MT19937"
