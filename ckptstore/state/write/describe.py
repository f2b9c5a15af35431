"""The items of a flat state, for the exchange between ranks; their memory, and their values as JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import torch

from ckptstore.errors import InvalidState
from ckptstore.format.digest import fingerprint, fingerprinter
from ckptstore.runtime.collector import collector_paused
from ckptstore.state.index.items import DIGEST_BYTES, Item, Mode
from ckptstore.state.index.key_paths import KeyPaths
from ckptstore.state.index.part import DTYPES
from ckptstore.state.live.flatten import FlatState, TensorEntry
from ckptstore.state.live.values import Encoder, encode_metadata
from ckptstore.state.tensors.boxes import Box, whole
from ckptstore.state.tensors.dense import Dense
from ckptstore.state.tensors.placement import (
    dtype_and_shape,
    is_distributed,
    is_dtensor,
    is_on_meta,
    lowest_shard_rank,
    mesh_share,
    name_of,
    pieces_of,
)
from ckptstore.state.tensors.tensor_memory import bytes_of, check_memory
from ckptstore.state.tensors.wrapped import Wrapped
from ckptstore.state.write.casts import Rules, casts_of


@dataclass(slots=True)
class Described:
    """One rank's description of a state."""

    items: list[Item] = field(default_factory=list)
    """The items, sorted by key."""
    memory: dict[str, tuple[torch.Tensor, ...]] = field(default_factory=dict)
    """The memory of the boxes of each tensor, in their order."""
    values: dict[str, str] = field(default_factory=dict)
    """The plain values as JSON texts."""
    own: frozenset[str] = frozenset()
    """The keys that were marked as each rank's own."""
    dense: dict[str, Dense] = field(default_factory=dict)
    """The memory of the tensors that are dense, but for those that are cast."""
    modules: dict[str, str] = field(default_factory=dict)
    """The metadata of modules as JSON texts, by the keys of the modules."""
    paths: KeyPaths = field(default_factory=KeyPaths)
    casts: dict[str, torch.dtype] = field(default_factory=dict)
    """The dtypes in which tensors are stored that have another one in memory."""

    @property
    def size_bytes(self) -> int:
        return sum([item.size_bytes for item in self.items if not item.tied_to])


@collector_paused()
def describe(flat: FlatState, *, compare: bool, allow_pickle: bool = False, rules: Rules = ()) -> Described:
    """Describe a flat state. With `compare` there are other ranks, so that digests are needed. `rules` say which
    tensors are cast.

    Raises InvalidState, with the key, for anything that cannot be stored.
    """
    casts = casts_of(flat, rules)
    dense = {key: one for key, one in flat.dense.items() if key not in casts} if casts else flat.dense
    found = Described(dense=dense, casts=casts)
    marked = flat.own | {first for key, first in flat.aliases.items() if key in flat.own}  # one memory, one fate
    for key, value in flat.values.items():
        if key in marked and isinstance(value, Wrapped) and value.label.part is not None:
            raise _own_part(key)
        _take_value(found, flat, key, value, allow_pickle=allow_pickle)
    for key, entry in flat.tensors.items():
        _take_tensor(found, key, entry, compare=compare, is_own=key in marked)
    by_key = {item.key: item for item in found.items} if flat.aliases else {}
    for key, first in flat.aliases.items():
        if first not in by_key:
            raise InvalidState(f"{key} is tied to {first}, which is not in the state")
        found.items.append(by_key[first]._replace(key=key, tied_to=first))
        found.memory[key] = found.memory[first]
    if marked:
        kinds = (Mode.COMPARE, Mode.VALUE)
        found.own = frozenset(item.key for item in found.items if item.key in marked and item.mode in kinds)
    for key, metadata in flat.modules.items():
        found.modules[key] = encode_metadata(metadata, key, allow_pickle=allow_pickle)
    if casts:
        found.items = [
            item._replace(dtype=name_of(casts[item.key]), live=item.dtype) if item.key in casts else item
            for item in found.items
        ]
    if compare and found.values:
        _fill_value_digests(found)
    found.items.sort(key=itemgetter(0))
    return found


def _take_value(found: Described, flat: FlatState, key: str, value: Any, *, allow_pickle: bool) -> None:
    beside: list[str] = []

    def store(kept: Any) -> str:
        if isinstance(kept, torch.Tensor):
            return flat.key_of(kept)
        name = f"{key}#{len(beside)}"
        if name in flat.paths:
            raise InvalidState(f"the key {name!r} is needed for a part of {key!r}, and is taken", hint="Rename it")
        beside.append(name)
        tensor = torch.from_numpy(kept if kept.flags.writeable else kept.copy())
        dtype, shape = dtype_name(tensor.dtype, name), tuple(tensor.shape)
        found.items.append(Item(name, Mode.BESIDE, dtype, shape, (whole(shape),) if tensor.numel() else (), owner=key))
        found.memory[name] = (tensor,)
        return name

    encoded = Encoder(store, allow_pickle=allow_pickle).encode(value, path=key)
    found.values[key] = json.dumps(encoded, separators=(",", ":"), allow_nan=False)
    found.items.append(Item(key, Mode.VALUE))


def _fill_value_digests(found: Described) -> None:
    """Fill in the digests of values. The digest of a value covers the tensors beside it."""
    beside: dict[str, list[bytes]] = {}
    for item in found.items:
        if item.mode is Mode.BESIDE:
            beside.setdefault(item.owner, []).append(fingerprint(bytes_of(found.memory[item.key][0])))
    for index, item in enumerate(found.items):
        if item.mode is Mode.VALUE:
            content = b"".join([found.values[item.key].encode(), *beside.get(item.key, ())])
            digest = _unlike_any() if item.key in found.own else fingerprint(content)
            found.items[index] = Item(item.key, Mode.VALUE, digest=digest)


def _unlike_any() -> bytes:
    """Return random bytes in place of a digest: no other rank has the same, so that each keeps its own."""
    return os.urandom(DIGEST_BYTES)


def _take_tensor(found: Described, key: str, entry: TensorEntry, *, compare: bool, is_own: bool) -> None:
    tensor, dense = entry.tensor, found.dense.get(key)
    if dense is not None and dense.form.dtype in DTYPES and dense.is_held_by(tensor):
        dtype, shape, boxes = dense.form.dtype, dense.form.shape, dense.form.boxes
        memory: tuple[torch.Tensor, ...] = (tensor.detach() if tensor.requires_grad else tensor,)
    else:
        if is_on_meta(tensor):
            raise InvalidState(f"{key} is on the meta device and has no numbers", hint="Materialise it first")
        pieces = pieces_of(tensor, key)
        for piece in pieces:
            check_memory(piece.tensor, key)
        torch_dtype, shape = dtype_and_shape(tensor)
        dtype = dtype_name(torch_dtype, key)
        boxes, memory = tuple([piece.box for piece in pieces]), tuple([piece.tensor for piece in pieces])
        if is_distributed(tensor):
            if is_own:
                raise _own_part(key)
            found.memory[key] = memory
            found.items.append(_distributed(key, tensor, dtype, shape, boxes))
            return
    found.memory[key] = memory
    mode, digest = Mode.LOWEST, b""
    if is_own:
        mode, digest = Mode.COMPARE, _unlike_any() if compare else b""
    elif entry.replicated and not entry.lowest_rank_counts:
        mode = Mode.SPLIT
    elif not entry.replicated:
        mode = Mode.COMPARE
        digest = _digest(memory, dtype, shape) if compare else b""
    found.items.append(Item(key, mode, dtype, shape, boxes, digest=digest))


def _own_part(key: str) -> InvalidState:
    return InvalidState(
        f"{key} is marked as the rank's own, and it is distributed over ranks: no rank alone has all of it",
        hint="Take per_rank away: the part of each rank is stored and given back as it is",
    )


def _distributed(key: str, tensor: Any, dtype: str, shape: tuple[int, ...], boxes: tuple[Box, ...]) -> Item:
    if not is_dtensor(tensor):
        return Item(key, Mode.SHARD, dtype, shape, boxes, group=lowest_shard_rank(tensor))
    layout, num_copies, sharers, position, group, member = mesh_share(tensor)
    mode, sharers = (Mode.SHARD, ()) if num_copies == 1 else (Mode.MESH, sharers)
    return Item(key, mode, dtype, shape, boxes, sharers, position, group, layout=layout, member=member)


def _digest(memory: Sequence[torch.Tensor], dtype: str, shape: tuple[int, ...]) -> bytes:
    digest = fingerprinter(f"{dtype}{shape}".encode())
    for tensor in memory:
        digest.update(bytes_of(tensor))
    return digest.digest()


def dtype_name(dtype: torch.dtype, key: str) -> str:
    """Return torch's name of a dtype, without the module; raise InvalidState for one that the format does not know."""
    name = name_of(dtype)
    if name not in DTYPES:
        raise InvalidState(f"{key} has the dtype {name}, which the format does not know")
    return name
