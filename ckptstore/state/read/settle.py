"""Comparison of stored tensors that a load would put into the same memory. Writes nothing to the state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import numpy as np
import torch

from ckptstore.state.read.read_plan import halves
from ckptstore.state.tensors.boxes import Box, whole, within
from ckptstore.state.tensors.overlap import Conflict, FilledBox, place_bytes, reach_bytes

COMPARED_BYTES = 32 << 20
"""The most that is read at once of one of two tensors for the same memory."""
SMALL_BYTES = 1 << 10
"""Boxes up to this size are read together: a setting of an optimizer may have been stored for each of thousands of
parameters."""

FillBoxes = Callable[[Sequence[tuple[str, Box, torch.Tensor]]], None]
"""`StoredState.fill_boxes`."""


def unsettled(conflicts: Sequence[Conflict], fill_boxes: FillBoxes) -> dict[str, str]:
    """Return, for each key of the state whose memory another key would fill with other bytes, the reason of the
    conflict.

    Reads both sides of each conflict: in parts if they are for exactly the same memory, whole if they have only some
    elements in common, and all that are very small together. Raises the errors of `fill_boxes`.
    """
    found: dict[str, str] = {}
    if len(conflicts) > 1:
        fill_boxes = _read_ahead(conflicts, fill_boxes)
    for first, second, is_same, reason in conflicts:
        if second.place.key in found:
            continue
        agree = _are_equal(first, second, fill_boxes) if is_same else _agree_in_common(first, second, fill_boxes)
        if not agree:
            shares = "is the same memory as" if is_same else "has memory in common with"
            found[second.place.key] = reason or (
                f"{shares} {first.place.key} in the state, and the checkpoint has other numbers for "
                f"{second.place.source} than for {first.place.source}: give them memory of their own, or load one of "
                "them with include"
            )
    return found


def _read_ahead(conflicts: Sequence[Conflict], fill_boxes: FillBoxes) -> FillBoxes:
    """Read the boxes that are very small in one go, and return a function that fills from them and reads the others."""
    known = {}
    for item in (item for conflict in conflicts for item in conflict[:2]):
        if prod(item.box.sizes) * item.place.saved_dtype.itemsize <= SMALL_BYTES:
            known[item.place.source, item.box] = torch.empty(item.box.sizes, dtype=item.place.saved_dtype, device="cpu")
    fill_boxes([(source, box, memory) for (source, box), memory in known.items()])

    def fill(wanted: Sequence[tuple[str, Box, torch.Tensor]]) -> None:
        for source, box, memory in wanted:
            if (source, box) in known:
                memory.copy_(known[source, box])
            else:
                fill_boxes([(source, box, memory)])

    return fill


def _are_equal(first: FilledBox, second: FilledBox, fill_boxes: FillBoxes) -> bool:
    """Return True if two stored boxes of the same sizes have the same bytes, in the dtype of the state."""
    sizes, most = first.box.sizes, max(1, COMPARED_BYTES // first.memory.element_size())
    return all(
        np.array_equal(
            _read(first, within(part, first.box), fill_boxes), _read(second, within(part, second.box), fill_boxes)
        )
        for part in halves(whole(sizes), sizes, most)
    )


def _agree_in_common(first: FilledBox, second: FilledBox, fill_boxes: FillBoxes) -> bool:
    """Return True if two stored boxes have the same bytes wherever their memory is the same."""
    start = min(first.memory.data_ptr(), second.memory.data_ptr())
    stop = max(item.memory.data_ptr() + reach_bytes(item.memory) for item in (first, second))
    memory, is_set = np.zeros(stop - start, np.uint8), np.zeros(stop - start, np.bool_)
    place_bytes(memory, start, first.memory)[...] = _read(first, first.box, fill_boxes)
    place_bytes(is_set, start, first.memory)[...] = True
    there, common = place_bytes(memory, start, second.memory), place_bytes(is_set, start, second.memory)
    return bool(np.array_equal(there[common], _read(second, second.box, fill_boxes)[common]))


def _read(item: FilledBox, box: Box, fill_boxes: FillBoxes) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """Return the bytes that the memory would have for a stored box, with the shape of the box and a dimension for the
    bytes of an element."""
    stored = torch.empty(box.sizes, dtype=item.place.saved_dtype, device="cpu")
    fill_boxes([(item.place.source, box, stored)])
    shown = stored.to(item.memory.dtype)
    if item.memory.is_neg():
        shown = shown.neg()
    if item.memory.is_conj():
        shown = shown.conj().resolve_conj()
    size = shown.element_size()
    found: np.ndarray[tuple[int, ...], np.dtype[np.uint8]] = shown.reshape(-1).view(torch.uint8).numpy()
    return found.reshape(*box.sizes, size)
