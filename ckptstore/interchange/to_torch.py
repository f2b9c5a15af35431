"""Export as one file of `torch.save`, which `torch.load(weights_only=True)` reads without ckptstore."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ckptstore.interchange.selection import Paths, Selection, nested
from ckptstore.interchange.streaming import close_off, stream_tensors
from ckptstore.interchange.torch_file import NotLoadable, Pending, check_loadable, write_torch_file
from ckptstore.state.live.flatten import map_tensors
from ckptstore.state.read.stored import StoredState

FILE_NAME = "state.pt"


@dataclass(frozen=True, slots=True)
class Tree:
    """The state to be written, with pending tensors."""

    state: Any
    pending: Mapping[str, Pending]
    """By the key under which the bytes are stored."""
    left_out: Mapping[str, str]
    """Keys of values that stock readers refuse, and why."""

    @property
    def size_bytes(self) -> int:
        """The bytes of all tensors."""
        return sum(tensor.size_bytes for tensor in self.pending.values())


def build_tree(stored: StoredState, selection: Selection, paths: Paths) -> Tree:
    """Put tensors and values where they stood in the state."""
    pending = {
        source: _pending(stored, source, number)
        for number, source in enumerate(dict.fromkeys(selection.sources.values()))
    }
    items: dict[tuple[str | int, ...], Any] = {}
    left_out, placed = {}, set[str]()
    for key, value in selection.values.items():
        path = selection.path_of(paths.path(key))
        without_tensors, inside = _without_tensors(value, key)
        try:
            check_loadable(without_tensors)
        except NotLoadable as error:
            left_out[key] = str(error)
            continue
        placed |= inside
        items[path] = map_tensors(value, path, lambda _key, reference: pending[selection.sources[reference.key]])
    for key, source in selection.sources.items():
        if key not in placed:
            items[selection.path_of(paths.path(key))] = pending[source]
    return Tree(nested(items), pending, left_out)


def _without_tensors(value: Any, key: str) -> tuple[Any, set[str]]:
    """A value with small tensors in it, and the keys of the places where they stand."""
    places: set[str] = set()

    def replace(place: str, _reference: Any) -> torch.Tensor:
        places.add(place)
        return torch.zeros(())

    return map_tensors(value, (key,), replace), places


def _pending(stored: StoredState, source: str, number: int) -> Pending:
    entry = stored.entry(source)
    return Pending(number, getattr(torch, entry.dtype), tuple(entry.shape))


def write_torch(stored: StoredState, tree: Tree, directory: Path, *, durable: bool) -> list[str]:
    """Write the file; its name. Raises CheckpointDamaged."""
    pieces = stream_tensors(stored, tree.pending)
    with (directory / FILE_NAME).open("xb") as file:
        numbered = ((tree.pending[key].number, data) for key, data in pieces)
        write_torch_file(file, tree.state, tree.pending.values(), numbered)
        close_off(file, durable=durable)
    return [FILE_NAME]
