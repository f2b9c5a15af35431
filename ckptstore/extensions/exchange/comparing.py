"""Compare the tensors of two checkpoints: by their digests, and by their bytes where digests do not suffice."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from ckptstore.checkpoint import Checkpoint, files_behind
from ckptstore.format.digest import BLOCK_BYTES, Digest
from ckptstore.loading.load_state import open_any
from ckptstore.loading.tensor_view import StoredTensor
from ckptstore.state.read.stored import StoredState
from ckptstore.state.tensors.boxes import Box

Change = Literal["added", "removed", "dtype", "shape", "ranks", "changed", "unknown"]
_READ_BYTES = 64 << 20
"""The bytes of a tensor in memory at once, twice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDifference:
    """One tensor that differs between two checkpoints, or may differ."""

    key: str
    change: Change
    """"ranks" where different ranks have one of their own; "unknown" where only reading all of it would tell."""
    a: StoredTensor | None
    b: StoredTensor | None
    largest: float | None = None
    """The largest absolute difference of two elements, of those compared. NaN where only one side has NaN."""


def tensor_differences(a: Checkpoint, b: Checkpoint, *, values: bool = False) -> tuple[list[TensorDifference], int]:
    """Return the tensors that differ, by key, and the number of equal ones.

    Equal means that all blocks have the same digest. A tensor below 1 MiB shares its blocks with others, so it is read
    where those differ. A larger tensor is "unknown" if the ranks divided it differently, if its digests are by
    different algorithms, or if torch's DCP wrote it without digests. With `values`, read such tensors and all changed
    ones, in pieces.

    Raises InvalidInput for a checkpoint without a state, CheckpointGone, CheckpointDamaged.
    """
    ours, theirs = a.tensors, b.tensors
    found: list[TensorDifference] = []
    num_equal = 0
    with ExitStack() as stack:
        files = [files_behind(checkpoint) for checkpoint in (a, b)]
        for one_of_both in files:
            stack.enter_context(one_of_both.held())
        pair = [open_any(one_of_both.alone()) for one_of_both in files]
        for side in pair:
            side.whole_index()
        for key in sorted({*ours, *theirs}):
            one, other = ours.get(key), theirs.get(key)
            change, largest = _compared(pair, one, other, values=values)
            if change is None:
                num_equal += 1
            else:
                found.append(TensorDifference(key=key, change=change, a=one, b=other, largest=largest))
    return found, num_equal


def _compared(
    pair: Sequence[Any], a: StoredTensor | None, b: StoredTensor | None, *, values: bool
) -> tuple[Change | None, float | None]:
    """Return the change, None if there is none, and the largest difference."""
    if a is None or b is None:
        return ("added" if a is None else "removed"), None
    if a.shape != b.shape or a.dtype != b.dtype:
        return ("shape" if a.shape != b.shape else "dtype"), None
    sides = [(side, side.index.aliases.get(a.key, a.key)) for side in pair]
    ranks, others = (side.index.ranks_of(source) if a.is_per_rank else [0] for side, source in sides)
    if a.is_per_rank != b.is_per_rank or ranks != others:
        return "ranks", None
    verdicts = {
        _by_digest(*(_digests(side, source, rank) for side, source in sides), size_bytes=a.size_bytes) for rank in ranks
    }
    if verdicts == {"equal"}:
        return None, None
    if not values and "changed" in verdicts:
        return "changed", None
    if not values and a.size_bytes > BLOCK_BYTES:
        return "unknown", None
    largest = [_by_value(sides, a, rank) for rank in ranks]
    if all(item is None for item in largest):
        return None, None
    known = [item for item in largest if item is not None]
    return "changed", next(filter(math.isnan, known), max(known)) if values else None


_Digests = dict[tuple[Box, int, int, frozenset[str]], tuple[Digest, ...]]


def _digests(side: Any, key: str, rank: int) -> _Digests | None:
    """Map each chunk, its place in its region, and the algorithms there, to the digests of that region; None without
    digests."""
    if not isinstance(side, StoredState):
        return None
    index, found = side.index, {}
    for chunk in index.chunks(key, rank):
        size_bytes = int(index.regions.size_bytes[chunk.region])
        place = chunk.offset - int(index.regions.offset[chunk.region])
        digests = tuple(index.digests(chunk.region))
        found[chunk.box, place, size_bytes, frozenset(digest.algorithm for digest in digests)] = digests
    return found


def _by_digest(a: _Digests | None, b: _Digests | None, *, size_bytes: int) -> Literal["equal", "changed", "unknown"]:
    if a is None or b is None or a.keys() != b.keys():
        return "unknown"
    if a == b:
        return "equal"
    has_its_own = sum(region_bytes for _, _, region_bytes, _ in a) == size_bytes
    return "changed" if has_its_own else "unknown"


def _by_value(sides: Sequence[tuple[Any, str]], tensor: StoredTensor, rank: int) -> float | None:
    """Return the largest absolute difference between a rank's two tensors, None if they are equal bit by bit."""
    first, key = sides[0]
    dtype = first.index.tensors[key].torch_dtype
    largest: float | None = None
    for box in _pieces(tensor):
        a, b = (torch.empty(box.sizes, dtype=dtype, device="cpu") for _ in range(2))
        for (side, source), memory in zip(sides, (a, b), strict=True):
            reader = replace(side, rank=rank) if isinstance(side, StoredState) else side
            reader.fill_boxes([(source, box, memory)])
        if torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)):
            continue
        difference = _largest(a, b)
        if math.isnan(difference):
            return difference
        largest = max(largest or 0.0, difference)
    return largest


def _largest(a: torch.Tensor, b: torch.Tensor) -> float:
    wide = torch.complex128 if a.is_complex() else torch.float64
    try:
        a, b = a.to(wide), b.to(wide)
    except (NotImplementedError, RuntimeError):  # torch calculates with no four-bit floats
        return math.nan
    same = (a == b) | (a.isnan() & b.isnan())
    return float((a - b).abs().masked_fill(same, 0.0).max())


def _pieces(tensor: StoredTensor) -> Iterator[Box]:
    """Split a tensor into boxes of some rows each."""
    shape = tensor.shape
    if not shape or 0 in shape:
        yield from [] if 0 in shape else [Box((), ())]
        return
    step = max(1, _READ_BYTES * shape[0] // max(1, tensor.size_bytes))
    for start in range(0, shape[0], step):
        yield Box((start, *(0 for _ in shape[1:])), (min(step, shape[0] - start), *shape[1:]))
