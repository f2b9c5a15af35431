"""A checkpoint with a tensor index in the form that planners of DCP expect: its keys, and their paths.

The index knows the tensors and the values. Only `.metadata`, if it was written, shows how a planner flattened the
state, and which values it took in one piece.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from ckptstore.errors import CheckpointDamaged, InvalidState
from ckptstore.runtime.torch_private import storage_info_class
from ckptstore.state.index.tensor_index import TensorIndex
from ckptstore.state.live.flatten import TensorRef, children, join_path, references_in, stock_leaves
from ckptstore.state.live.matching import above
from ckptstore.state.live.values import needs_code
from ckptstore.state.read.stored import StoredState
from ckptstore.state.tensors.wrapped import Wrapped, WrappedPart
from ckptstore.stock.stock_pickle import StockPlace
from ckptstore.stock.stock_write import stock_names, stock_tensors


class MissingPaths(dict[str, Any]):
    """The replacement for the paths of a checkpoint that has none: a look-up raises InvalidState, with the reason."""

    def __missing__(self, key: str) -> Any:
        raise InvalidState(
            f"the path of {key} is not known: the checkpoint was saved without .metadata",
            hint="Load it with a state dict of the same structure, or save with stock_readable=True",
        )

    def get(self, key: str, default: Any = None) -> Any:
        """Return `self[key]`, which raises for a missing key: to leave something out because its path is not known
        would be silent."""
        return self[key]


@dataclass(slots=True)
class View:
    """The items that a planner sees, and the stored tensors and values behind them."""

    items: dict[str, Any] = field(default_factory=dict)
    """The items of `Metadata.state_dict_metadata`."""
    places: dict[MetadataIndex, Any] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    """Plain values by the keys of the items, with references for tensors in them."""
    wrapped: dict[tuple[str, tuple[int, ...]], tuple[str, Wrapped]] = field(default_factory=dict)
    """The key of its value, and the value, for key and offsets of a tensor that is stored as its inner tensors."""
    paths: Mapping[str, Any] = field(default_factory=MissingPaths)
    keys: dict[str, str] = field(default_factory=dict)
    """The key of the index, for a tensor or value that a planner knows by another name."""
    barred: frozenset[str] = frozenset()
    """Keys of values that need code to be read, which was not allowed."""


def view_of_state(state: StoredState, stock: Metadata | None) -> View:
    """Return the view of a state; `stock` is the checkpoint's `.metadata`, if it has one. Raises StateMismatch as
    `StoredState.saved` does."""
    index, view = state.index, View()
    encoded = {**index.common_values(), **index.own_values(state.rank)}
    allowed = state.allow_pickle
    view.barred = frozenset(key for key, value in encoded.items() if not allowed and needs_code(value))
    saved = state.saved(lambda key: key not in view.barred)
    add_stock_tensors(
        index, view.items, view.places, lambda key: None if key in saved.skipped else state.source_rank(key)
    )
    listed = {} if stock is None else stock.state_dict_metadata
    names = stock_names(
        {*index.tensors, *saved.values}, lambda _, names: stock is None or not listed.keys().isdisjoint(names)
    )
    hidden: set[str] = set()
    for key, value in saved.values.items():
        for path, found in _wrapped_in(value, (key,)):
            hidden.update(_add_wrapped(view, join_path(path), found))
        leaves = (
            [((key,), value)]
            if isinstance(listed.get(names.get(key, key)), BytesStorageMetadata)
            else stock_leaves(value, (key,))
        )
        for path, leaf in leaves:
            if isinstance(leaf, TensorRef):
                continue  # a separate item, of the tensor kind
            name = join_path(path)
            view.values[name] = leaf
            view.items[name] = BytesStorageMetadata()
            hidden.update(ref for ref in references_in(leaf) if ref.startswith(f"{name}."))
    _rename(view, names, keeps=stock is None)
    skipped = {name for key in saved.skipped for name in (key, names.get(key, key))}
    for key, entry in listed.items():
        if isinstance(entry, BytesStorageMetadata) and skipped.isdisjoint({key, *above(key)}):
            view.items.setdefault(key, BytesStorageMetadata())
    for key in view.barred:
        if not any(name == key or name.startswith(f"{key}.") for name in view.items):
            view.items[key] = BytesStorageMetadata()
    for key in hidden:
        for name in {key, names.get(key, key)}:
            view.items.pop(name, None)
    if stock is not None and stock.planner_data is not None:
        view.paths = stock.planner_data
    return view


def _rename(view: View, names: Mapping[str, str], *, keeps: bool) -> None:
    """Show stock's names for the contents of optimizers; with `keeps` beside their keys, since either may be asked
    for."""
    if not names:
        return

    def renamed(held: Mapping[Any, Any], name_of: Callable[[Any], Any]) -> dict[Any, Any]:
        return {name_of(key): item for key, item in held.items()} | (dict(held) if keeps else {})

    view.keys = {name: key for key, name in names.items()}
    view.items = renamed(view.items, lambda key: names.get(key, key))
    view.values = renamed(view.values, lambda key: names.get(key, key))
    view.places = renamed(view.places, lambda place: replace(place, fqn=names.get(place.fqn, place.fqn)))
    view.wrapped = renamed(view.wrapped, lambda place: (names.get(place[0], place[0]), place[1]))


def _wrapped_in(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Wrapped]]:
    if isinstance(value, Wrapped):
        yield path, value
        return
    for part, item in children(value):
        yield from _wrapped_in(item, (*path, part))


def _add_wrapped(view: View, key: str, value: Wrapped) -> Iterator[str]:
    """Show a wrapped tensor as the one tensor that it is. Yield the keys of its inner ones."""
    label = value.label
    part = label.part or WrappedPart(key, (0,) * len(label.shape), label.shape)
    dtype = getattr(torch, label.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointDamaged(f"{key} shows the dtype {label.dtype!r}")
    offsets = torch.Size(part.offsets)
    entry = view.items.get(part.of)
    if not isinstance(entry, TensorStorageMetadata):
        entry = view.items[part.of] = TensorStorageMetadata(TensorProperties(dtype), torch.Size(part.shape), [])
    entry.chunks.append(ChunkStorageMetadata(offsets, torch.Size(label.shape)))
    view.wrapped[part.of, tuple(offsets)] = key, value
    yield from references_in(value)


def add_stock_tensors(
    index: TensorIndex,
    items: dict[str, Any],
    storage: dict[MetadataIndex, Any],
    rank_of: Callable[[str], int | None] | None = None,
) -> None:
    """Put the tensors of an index into the two dicts of a `Metadata`; the chunks of existing entries are replaced.
    `rank_of` as in `stock_tensors`."""
    lies_at, size = storage_info_class(), lru_cache(None)(torch.Size)  # equal parts are pickled once
    properties = lru_cache(None)(TensorProperties)
    for fqn, dtype, shape, placed in stock_tensors(index, rank_of):
        chunks = []
        for number, (box, place) in enumerate(placed):
            offsets = size(box.offsets)
            chunks.append(ChunkStorageMetadata(offsets, size(box.sizes)))
            storage[MetadataIndex(fqn, offsets, number)] = lies_at(*place)
        if fqn in items:
            items[fqn].chunks = chunks
        else:
            items[fqn] = TensorStorageMetadata(properties(dtype), size(shape), chunks)


def add_stock_bytes(places: Mapping[str, StockPlace], items: dict[str, Any], storage: dict[MetadataIndex, Any]) -> None:
    """Put plain values, which lie at these places, into the two dicts of a `Metadata`."""
    lies_at = storage_info_class()
    for key, place in places.items():
        items[key] = BytesStorageMetadata()
        storage[MetadataIndex(key)] = lies_at(*place)
