"""Who writes what of stock plans: what the ranks hold, listed in their plans, dealt by the coordinator."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from ckptstore.state.boxes import Box
from ckptstore.state.deal import Dealt, chunks_of, deal

_Held = tuple[str, tuple[int, ...]]
"""A key and the offsets of a box."""


@dataclass(slots=True)
class Assignment:
    """What the coordinator tells a rank: where the files go, and for each item of its plan the boxes to write."""

    prefix: str
    boxes: dict[int, list[Box]] = field(default_factory=dict)


def held_boxes(plan: SavePlan) -> dict[_Held, tuple[int, ...]]:
    """The boxes of tensors that a rank has, with their sizes."""
    return {_held(item): tuple(item.tensor_data.chunk.sizes) for item in plan.items if item.tensor_data is not None}


def deal_plans(plans: Sequence[SavePlan], prefix: str, *, split_plain_bytes: int | None) -> list[SavePlan]:
    """The plans with what each rank writes. A box that several ranks hold is added to the plan of each that gets a
    part of it."""
    dealer = _Dealer(plans, prefix)
    for rank, plan in enumerate(plans):
        for item in plan.items:
            dealer.take(rank, item)
    dealer.deal_shared(split_plain_bytes)
    return [
        dataclasses.replace(plan, items=own, storage_data=assignment)
        for plan, own, assignment in zip(plans, dealer.items, dealer.assignments, strict=True)
    ]


class _Dealer:
    def __init__(self, plans: Sequence[SavePlan], prefix: str) -> None:
        self.items: list[list[WriteItem]] = [[] for _ in plans]
        self.assignments = [Assignment(prefix) for _ in plans]
        self._holders: dict[_Held, list[int]] = {}
        self._shared: dict[tuple[int, ...], list[WriteItem]] = {}
        for rank, plan in enumerate(plans):
            for held in plan.storage_data or {}:
                self._holders.setdefault(held, []).append(rank)

    def take(self, rank: int, item: WriteItem) -> None:
        """Take in an item that the planner gave to one rank."""
        if item.type is WriteItemType.BYTE_IO:
            self.items[rank].append(item)
            return
        ranks = self._holders.get(_held(item), [rank])
        if len(ranks) == 1 or not _dealt(item).size_bytes:
            self._assign(rank, item, chunks_of(_box(item), _dealt(item).element_bytes))
        else:
            self._shared.setdefault(tuple(ranks), []).append(item)

    def deal_shared(self, split_plain_bytes: int | None) -> None:
        """Give each holder its share of what several ranks hold."""
        for ranks, group in self._shared.items():
            dealt = [_dealt(item, split_plain_bytes) for item in group]
            for share, rank in enumerate(ranks):
                for number, start, stop in deal(dealt, len(ranks), share):
                    boxes = chunks_of(_box(group[number]), dealt[number].element_bytes, start, stop)
                    self._assign(rank, group[number], boxes)

    def _assign(self, rank: int, item: WriteItem, boxes: list[Box]) -> None:
        self.assignments[rank].boxes[len(self.items[rank])] = boxes
        self.items[rank].append(item)


def _held(item: WriteItem) -> _Held:
    return item.index.fqn, tuple(item.index.offset or ())


def _box(item: WriteItem) -> Box:
    assert item.tensor_data is not None  # every item but bytes has it
    return Box(tuple(item.tensor_data.chunk.offsets), tuple(item.tensor_data.chunk.sizes))


def _dealt(item: WriteItem, split_plain_bytes: int | None = None) -> Dealt:
    """The item for dealing; a plain tensor below the limit stays in one piece."""
    assert item.tensor_data is not None  # every item but bytes has it
    sizes = tuple(item.tensor_data.chunk.sizes)
    element_bytes = item.tensor_data.properties.dtype.itemsize
    made = Dealt(sizes, element_bytes)
    is_plain = item.type is WriteItemType.TENSOR
    keeps_whole = is_plain and (split_plain_bytes is None or made.size_bytes < split_plain_bytes)
    return Dealt(sizes, element_bytes, is_whole=keeps_whole)
