"""The check that a staged copy equals its tensor. Digests cannot show that, since every digest is of the copy.

Elements are picked by index, which takes another way through torch than a copy of a stretch does.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from ckptstore.errors import CkptstoreError
from ckptstore.state.tensors.placement import PLAIN_TYPES
from ckptstore.state.tensors.segments import bits_of

_SAMPLED_BYTES = 512 << 20
"""The bytes of large tensors for which one more tensor is sampled."""
_SMALL = 4
"""The number of tensors in slabs that are sampled."""
_RUN = 4
"""The length of the runs in which elements are picked: at both ends, and in between."""
_RUNS = 2


class Placed(NamedTuple):
    """A tensor, and the place of its copy."""

    key: str
    file: int
    offset: int
    """The offset in the file, in bytes."""
    size_bytes: int
    is_gathered: bool
    """True if its bytes do not simply lie in host memory."""
    tensor: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Sample:
    placed: Placed
    positions: np.ndarray[Any, Any]
    """The places of elements, counted as in a contiguous tensor."""
    values: torch.Tensor
    """The elements at these places, on the device of the tensor: the check does not wait for a device."""


class CopyCheck:
    """The check of one save. Create it in the thread that saves, before anything is copied."""

    def __init__(self, large: Sequence[Placed], small: Sequence[Placed], *, turn: int, every: bool) -> None:
        """Choose the samples. `large` have a payload each, `small` lie in slabs.

        With `every` all bytes of all of them are compared. Otherwise a few elements are compared: of at least one
        tensor of each device, dtype and kind of memory, of one more for each 512 MiB, and of some small ones. Each turn
        takes others, so that all are compared in time. That costs about 0.1 ms for each tensor, below 1 % of copying
        512 MiB.
        """
        self._every = [*large, *small] if every else []
        total_bytes = sum(item.size_bytes for item in large)
        chosen = [*_of_each_kind(large), *_in_turn(large, turn, total_bytes // _SAMPLED_BYTES)]
        chosen = [] if every else [*chosen, *_in_turn(small, turn, _SMALL)]
        numbers = random.Random(turn)
        self._samples = [_sample(placed, numbers) for placed in {item[:3]: item for item in chosen}.values()]

    def compare(self, copies: Sequence[memoryview]) -> None:
        """Compare with the copies of all files. Raises CkptstoreError, with the key, for one that differs."""
        for placed in self._every:
            copy = _elements(copies[placed.file], placed.offset, placed.tensor)
            _refuse(placed, copy, _as_elements(_plain(placed.tensor)))
        for sample in self._samples:
            copy = _elements(copies[sample.placed.file], sample.placed.offset, sample.placed.tensor)
            _refuse(sample.placed, copy[sample.positions], _as_elements(sample.values))


def _of_each_kind(large: Iterable[Placed]) -> Iterable[Placed]:
    kinds = {(item.is_gathered, item.tensor.device, item.tensor.dtype): item for item in large}
    return kinds.values()


def _in_turn(placed: Sequence[Placed], turn: int, count: int) -> Iterable[Placed]:
    return [placed[(turn * count + number) % len(placed)] for number in range(min(count, len(placed)))]


def _sample(placed: Placed, numbers: random.Random) -> _Sample:
    tensor, last = _plain(placed.tensor), placed.tensor.numel()
    starts = [0, max(0, last - _RUN), *(numbers.randrange(last) for _ in range(_RUNS))]
    positions = np.unique([at for start in starts for at in range(start, min(start + _RUN, last))])
    if tensor.dim() == 0:
        return _Sample(placed, positions, tensor.reshape(1))
    places = np.unravel_index(positions, tuple(tensor.shape))
    with torch.no_grad():
        try:
            index = tuple(torch.from_numpy(place).to(tensor.device, non_blocking=True) for place in places)
            return _Sample(placed, positions, tensor[index])
        except torch.OutOfMemoryError:  # a full device is saved all the same, but has to be waited for
            elements = [_on_host(tensor[tuple(map(int, place))]) for place in zip(*places, strict=True)]
            return _Sample(placed, positions, torch.stack(elements))


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return bits_of(tensor if type(tensor) in PLAIN_TYPES else tensor.as_subclass(torch.Tensor))


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy in host memory."""
    # `cpu()` would first copy conjugates and opposites on the device, which may be full.
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(tensor)


def _as_elements(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return the bytes of a tensor, a row for each element."""
    return _on_host(tensor).reshape(-1).view(torch.uint8).numpy().reshape(-1, tensor.element_size())


def _elements(copy: memoryview, offset: int, tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return the copied bytes of a tensor, a row for each element."""
    element_bytes = tensor.element_size()
    found = np.frombuffer(copy, np.uint8, tensor.numel() * element_bytes, offset)
    return found.reshape(-1, element_bytes)


def _refuse(placed: Placed, copy: np.ndarray[Any, Any], original: np.ndarray[Any, Any]) -> None:
    if not np.array_equal(copy, original):
        tensor = placed.tensor
        raise CkptstoreError(
            f"the copy of {placed.key} that was made for this save is not the tensor: {int((copy != original).sum())} "
            f"of {copy.size} bytes that were compared differ ({tensor.dtype}, shape {list(tensor.shape)}, strides "
            f"{list(tensor.stride())}, on {tensor.device})",
            hint="Nothing is committed. This is a defect of ckptstore: please report it. save() copies in another way",
        )
