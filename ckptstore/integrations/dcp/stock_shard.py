"""One rank's writes of a stock plan: its tensors, the inner tensors of those that wrap others, its plain values.

Everything is checked, and anything that could not be read back is refused, before the first byte is written.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from ckptstore.errors import InvalidState
from ckptstore.integrations.dcp.stock_deal import Assignment, Held, held_by, tensor_data_of
from ckptstore.runtime.torch_private import is_wrapper
from ckptstore.state.index.items import Item, Mode
from ckptstore.state.index.part import BESIDE_VALUE, DTYPES
from ckptstore.state.live.values import Encoder, Frame, check_key
from ckptstore.state.tensors.boxes import Box, whole
from ckptstore.state.tensors.placement import PLAIN_TYPES
from ckptstore.state.tensors.tensor_memory import check_memory, fingerprints_of
from ckptstore.state.tensors.wrapped import Wrapped, WrappedPart, key_of_part, unwrap
from ckptstore.state.write.assignment import RankPlan, Write, chunks_of
from ckptstore.state.write.describe import Described, dtype_name
from ckptstore.state.write.shard_files import ShardFiles, Striping

WrappedBox = tuple[str, tuple[int, ...], tuple[int, ...]]
"""Key, offsets and sizes of a box whose tensor wraps others."""
InnerPlace = tuple[str, tuple[str, ...]]
"""The key of the tensor that wraps, and the last parts of the path of an inner one, in the place of that key's last."""


class DcpShard:
    """The tensors and values of a plan that one rank writes."""

    def __init__(
        self,
        plan: SavePlan,
        planner: SavePlanner,
        *,
        rank: int,
        striping: Striping,
        algorithm: str,
        allow_pickle: bool,
    ) -> None:
        """Take in the plan; `algorithm` is that of the digests. Raises InvalidState, with the key, for anything that
        cannot be read back."""
        self._assignment: Assignment = plan.storage_data
        self._allow_pickle = allow_pickle
        self._keys = {item.index.fqn for item in plan.items}
        for key in self._keys:
            check_key(key)
        self._described = Described()
        self._items: list[Item] = []
        self._numbers: dict[str, int] = {}
        self._writes: list[Write] = []
        self._flags: dict[str, int] = {}
        self._frames: dict[str, bytes] = {}
        self.wrapped: list[WrappedBox] = []
        """The boxes that are stored as their inner tensors."""
        self.inner: dict[str, InnerPlace] = {}
        """The inner tensors of those, by key."""
        self._compared: dict[Held, tuple[torch.Tensor, ...]] = {}
        for item in plan.items:
            data: Any = planner.resolve_data(item)
            if item.type is WriteItemType.BYTE_IO:
                self._take_bytes(item.index.fqn, data)
            else:
                self._take_tensor(item, data)
        self._described.items = self._items
        empty = tuple(number for number, item in enumerate(self._items) if 0 in item.shape)
        planned = RankPlan(tuple(self._writes), empty, self._flags, common=tuple(self._described.values))
        self.files = ShardFiles(self._described, planned, rank=rank, striping=striping, algorithm=algorithm)
        self.stock = self.files.add_frames(self._frames)
        """The places of plain values for stock readers."""

    def fingerprints(self) -> list[tuple[str, tuple[int, ...], bytes]]:
        """Return key, offsets and fingerprint of each tensor that other ranks must have alike. Reads them whole."""
        found = fingerprints_of({repr(held): tensors for held, tensors in self._compared.items()})
        return [(*held, found[repr(held)]) for held in self._compared]

    def _take_bytes(self, key: str, data: Any) -> None:
        """Add a plain value twice: framed for stock readers, and as JSON for all others."""
        frame = bytes(data.getvalue())
        try:
            # Safe without weights_only: this process has just made the frame.
            value = torch.load(io.BytesIO(frame), map_location="cpu", weights_only=False)
        except Exception:  # for bytes of the planner's own, torch may raise anything
            value = Frame(frame)
        beside: list[str] = []

        def store(kept: Any) -> str:
            name = f"{key}#{len(beside)}"
            beside.append(name)
            tensor = kept if isinstance(kept, torch.Tensor) else torch.from_numpy(kept.copy())
            self._add_whole(name, _plain(tensor, key), flags=BESIDE_VALUE)
            return name

        try:
            encoded = Encoder(store, allow_pickle=self._allow_pickle).encode(value, path=key)
        except InvalidState as error:
            raise InvalidState(
                error.message, hint="Store what it is made of, or pass allow_pickle=True to StoreWriter and StoreReader"
            ) from None
        self._described.values[key] = json.dumps(encoded, separators=(",", ":"), allow_nan=False)
        self._frames[key] = frame

    def _take_tensor(self, item: WriteItem, tensor: torch.Tensor) -> None:
        key, data = item.index.fqn, tensor_data_of(item)
        held = Box(tuple(data.chunk.offsets), tuple(data.chunk.sizes))
        boxes = self._assignment.boxes.get(held_by(item))
        if boxes is None:
            raise InvalidState(
                f"the planner has added {key} at {held_by(item)[1]} to the plan after all ranks had agreed on it",
                hint="Add it in create_local_plan, not in finish_plan",
            )
        if type(tensor) not in PLAIN_TYPES and is_wrapper(tensor):
            compared = self._take_wrapped(key, tensor, held, tuple(data.size), boxes)
        else:
            compared = self._take_dense(key, tensor, held, tuple(data.size), boxes)
        if held_by(item) in self._assignment.compared:
            self._compared[held_by(item)] = compared

    def _take_dense(
        self, key: str, tensor: torch.Tensor, held: Box, shape: tuple[int, ...], boxes: Sequence[Box]
    ) -> tuple[torch.Tensor, ...]:
        """Add a tensor that lies in memory as it is. Return it, without its gradient."""
        tensor = _dense(tensor.detach(), key)
        if tuple(tensor.shape) != held.sizes:
            raise InvalidState(f"the planner gave {tuple(tensor.shape)} for {key}, its plan says {held.sizes}")
        number = self._numbers.setdefault(key, len(self._items))
        if number == len(self._items):
            self._items.append(Item(key, Mode.SHARD, dtype_name(tensor.dtype, key), shape))
        one = self._items[number]
        self._items[number] = one._replace(boxes=(*one.boxes, held))
        self._described.memory[key] = (*self._described.memory.get(key, ()), tensor)
        self._writes += [Write(number, len(one.boxes), box) for box in boxes]
        return (tensor,)

    def _take_wrapped(
        self, key: str, tensor: torch.Tensor, held: Box, shape: tuple[int, ...], boxes: Sequence[Box]
    ) -> tuple[torch.Tensor, ...]:
        """Add a tensor that wraps others. It cannot be cut: of the ranks that have it, the one that was assigned its
        beginning stores it whole. Return its inner tensors."""
        part = None if held == whole(shape) else WrappedPart(key, held.offsets, shape)
        wrapped = unwrap(tensor, key, part)
        if wrapped.label.shape != held.sizes:
            raise InvalidState(f"the planner gave {wrapped.label.shape} for {key}, its plan says {held.sizes}")
        is_mine = any(box.offsets == held.offsets for box in boxes) if held.volume else part is None
        if is_mine:
            name = key if part is None else key_of_part(key, held.offsets)
            keys: dict[int, str] = {}
            self._take_inner(wrapped, key, (name,), keys)
            encoded = Encoder(lambda inner: keys[id(inner)]).encode(wrapped, path=name)
            self._described.values[name] = json.dumps(encoded, separators=(",", ":"))
            self.wrapped.append((key, held.offsets, held.sizes))
        return tuple(_inner_tensors(wrapped))

    def _take_inner(self, wrapped: Wrapped, key: str, path: tuple[str, ...], keys: dict[int, str]) -> None:
        for attribute, inner in wrapped.items():
            below = (*path, attribute)
            name = ".".join(below)
            if name in self._keys:
                raise InvalidState(f"the key {name!r} is needed for a part of {key!r}, and is taken", hint="Rename it")
            if isinstance(inner, Wrapped):
                self._take_inner(inner, key, below, keys)
                continue
            check_memory(inner, name)
            keys[id(inner)] = name
            self.inner[name] = key, below
            self._add_whole(name, inner)

    def _add_whole(self, key: str, tensor: torch.Tensor, *, flags: int = 0) -> None:
        """Add a tensor that is in no plan; this rank alone writes it."""
        number, box = len(self._items), whole(tuple(tensor.shape))
        dtype = dtype_name(tensor.dtype, key)
        self._numbers[key] = number
        owner = key.rpartition("#")[0] if flags & BESIDE_VALUE else ""
        self._items.append(Item(key, Mode.SHARD, dtype, box.sizes, (box,), owner=owner))
        self._described.memory[key] = (tensor,)
        if flags:
            self._flags[key] = flags
        self._writes += [Write(number, 0, chunk) for chunk in chunks_of(box, DTYPES[dtype][1])]


def _inner_tensors(wrapped: Wrapped) -> Iterator[torch.Tensor]:
    for inner in wrapped.values():
        yield from _inner_tensors(inner) if isinstance(inner, Wrapped) else (inner,)


def _dense(tensor: torch.Tensor, key: str) -> torch.Tensor:
    """Return the tensor if its numbers are in memory as its shape and strides say. Raises InvalidState otherwise."""
    if tensor.is_meta:
        raise InvalidState(f"{key} is on the meta device and has no numbers", hint="Materialise it first")
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise InvalidState(f"{key} has the layout {tensor.layout}", hint="Store a dense tensor")
    if type(tensor) not in PLAIN_TYPES and tensor.numel() and not tensor.data_ptr():
        unwrap(tensor, key)  # raises, with the reason
    check_memory(tensor, key)
    return tensor


def _plain(tensor: torch.Tensor, key: str) -> torch.Tensor:
    """Return a tensor inside a plain value. Raises InvalidState unless it comes back exactly."""
    if type(tensor) is not torch.Tensor or tensor.requires_grad:
        kind = type(tensor).__name__ if type(tensor) is not torch.Tensor else "tensor that requires a gradient"
        raise InvalidState(f"{key} has a {kind} inside of a plain value", hint="Store it under a key of its own")
    return _dense(tensor, key)
