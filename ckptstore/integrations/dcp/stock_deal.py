"""Division of the writes of stock plans: the ranks list their boxes in their plans, and the coordinator deals them.

A planner may cache plans (`DefaultSavePlanner(enable_plan_caching=True)`): a rank whose plan is as before sends an
empty one that is not usable, and so does the coordinator. The rank then uses the plan that it got at an earlier save.
So a plan may hold only contents that stay true from save to save, and the place of the files does not. A rank receives
the place when the coordinator's answer arrives, whatever the planner then does with the answer.
"""

from __future__ import annotations

import dataclasses
import threading
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from ckptstore.errors import InvalidState
from ckptstore.format.digest import BLOCK_BYTES
from ckptstore.runtime.torch_private import cached_plans
from ckptstore.state.tensors.boxes import Box
from ckptstore.state.write.assignment import Dealt, chunks_of, deal

Held = tuple[str, tuple[int, ...]]
"""The key of a tensor and the offsets of a box."""


@dataclass(frozen=True, slots=True)
class Told:
    """The coordinator's message for one save: the prefix of the keys of its files. Unpickling it receives it."""

    prefix: str

    def __reduce__(self) -> tuple[type[Told] | object, tuple[str]]:
        return _hear, (self.prefix,)


class _Present(threading.local):
    """The save that runs in this thread."""

    told: Told | None = None
    """The coordinator's message; None before its answer arrives."""


present_save = _Present()


def _hear(prefix: str) -> Told:
    present_save.told = told = Told(prefix)
    return told


@dataclass(slots=True)
class Assignment:
    """The boxes that the coordinator assigned to a rank, for each tensor item of its plan. Valid for later saves of the
    same plan too."""

    deal_id: str
    """The same on all ranks of one deal."""
    split_plain_bytes: int | None
    told: Told
    """The coordinator's message; nobody reads the field, but unpickling it calls `_hear`."""
    boxes: dict[Held, list[Box]] = field(default_factory=dict)
    compared: set[Held] = field(default_factory=set)
    """The items that several ranks must have alike, since each of them may write a part."""


def held_boxes(plan: SavePlan) -> dict[Held, tuple[int, ...]]:
    """Return the boxes of tensors that a rank has, with their sizes; sent with its plan."""
    return {held_by(item): tuple(item.tensor_data.chunk.sizes) for item in plan.items if item.tensor_data is not None}


def deal_plans(plans: Sequence[SavePlan], told: Told, *, split_plain_bytes: int | None) -> list[SavePlan]:
    """Return the plans with the boxes that each rank writes. A box that several ranks hold in the same size is added to
    the plan of each that gets a part of it, and to all of these plans if they might have got one.

    When no plan has changed since a save before, the earlier deal stays. When some have, all ranks get a new deal.
    Raises InvalidState when the plans of the others are not available.
    """
    if not any(plan.usable for plan in plans):
        return [dataclasses.replace(plan, storage_data=told) for plan in plans]
    if not all(plan.usable for plan in plans):
        plans = cached_plans(plans)
        if not plans:
            raise InvalidState(
                "the planner gave the plans of some ranks and keeps those of the others to itself",
                hint="Use DefaultSavePlanner, or a planner that does not cache plans",
            )
    return _dealt_plans(plans, Assignment(uuid.uuid4().hex, split_plain_bytes, told))


def _dealt_plans(plans: Sequence[SavePlan], empty: Assignment) -> list[SavePlan]:
    assignments = [dataclasses.replace(empty, boxes={}, compared=set()) for _ in plans]
    items: list[list[WriteItem]] = [[] for _ in plans]
    holders: dict[tuple[Held, tuple[int, ...]], list[int]] = {}
    shared: dict[tuple[int, ...], list[WriteItem]] = {}
    for rank, plan in enumerate(plans):
        for held in plan.storage_data.items() if isinstance(plan.storage_data, dict) else ():
            holders.setdefault(held, []).append(rank)

    def assign(rank: int, item: WriteItem, boxes: list[Box]) -> None:
        assignments[rank].boxes[held_by(item)] = boxes
        items[rank].append(item)

    for rank, plan in enumerate(plans):
        for item in plan.items:
            if item.type is WriteItemType.BYTE_IO:
                items[rank].append(item)
                continue
            box, dealt = _dealt(item, empty.split_plain_bytes)
            ranks = holders.get((held_by(item), box.sizes), [rank])
            if len(ranks) == 1 or not dealt.size_bytes:
                assign(rank, item, chunks_of(box, dealt.element_bytes))
            else:
                shared.setdefault(tuple(ranks), []).append(item)
    for ranks_of_all, group in shared.items():
        found = [_dealt(item, empty.split_plain_bytes) for item in group]
        for share, rank in enumerate(ranks_of_all):
            alike = [number for number, (_, dealt) in enumerate(found) if not dealt.is_whole]
            assignments[rank].compared.update(held_by(group[number]) for number in alike)
            cuts = dict.fromkeys(alike, (0, 0))  # what is compared is in the plan of each, also without a part
            cuts |= {
                number: (start, stop)
                for number, start, stop in deal([one for _, one in found], len(ranks_of_all), share)
            }
            for number, cut in sorted(cuts.items()):
                box, dealt = found[number]
                assign(rank, group[number], chunks_of(box, dealt.element_bytes, *cut))
    return [
        dataclasses.replace(plan, items=own, storage_data=assignment)
        for plan, own, assignment in zip(plans, items, assignments, strict=True)
    ]


def held_by(item: WriteItem) -> Held:
    """Return key and offsets of an item."""
    return item.index.fqn, tuple(item.index.offset or ())


def tensor_data_of(item: WriteItem) -> TensorWriteData:
    """Return the description of the tensor of an item. Raises InvalidState for an item without one: those of bytes."""
    if item.tensor_data is None:
        raise InvalidState(f"the planner made an item of {item.index.fqn} that is no bytes and has no tensor")
    return item.tensor_data


def _dealt(item: WriteItem, split_plain_bytes: int | None) -> tuple[Box, Dealt]:
    """Return the box of an item, and the item for dealing. One below the limit stays in one piece: that of plain
    tensors, or what `deal` never cuts."""
    data = tensor_data_of(item)
    box = Box(tuple(data.chunk.offsets), tuple(data.chunk.sizes))
    made = Dealt(box.sizes, data.properties.dtype.itemsize)
    least_bytes = split_plain_bytes if item.type is WriteItemType.TENSOR else BLOCK_BYTES
    return box, made._replace(is_whole=least_bytes is None or made.size_bytes < least_bytes)
