"""The writes of a rank, from its items and the agreement of all ranks. Pure, and cheap to repeat."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ckptstore.runtime.collector import collector_paused
from ckptstore.state.index.items import Item, Mode
from ckptstore.state.index.part import BESIDE_VALUE, DTYPES, PER_RANK
from ckptstore.state.tensors.boxes import Box
from ckptstore.state.write.agree import Agreement
from ckptstore.state.write.deal import Dealt, chunks_of, deal


class Write(NamedTuple):
    """One box of a tensor that this rank writes."""

    item: int
    """The place of the item."""
    held: int
    """The place, among the item's boxes, of the box that it lies in."""
    box: Box
    """The box, counted from the whole tensor."""


@dataclass(frozen=True, slots=True)
class RankPlan:
    """The writes of one rank."""

    writes: tuple[Write, ...] = ()
    """The writes in the order of items."""
    empty: tuple[int, ...] = ()
    """Items of which this rank has no element: it writes nothing, but they exist."""
    flags: dict[str, int] = field(default_factory=dict)
    """The index flags of tensors that have any."""
    ties: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """The further keys of the same memory, for each key that is written."""
    common: tuple[str, ...] = ()
    """Values that this rank writes for all."""
    own: tuple[str, ...] = ()
    """Values that this rank writes for itself."""
    spans: tuple[tuple[int, int], ...] = ()
    """The first and last item of each stretch of items in which it writes something that has no rule, or that other
    ranks have too. There may be others in a stretch."""


@collector_paused()
def plan_rank(items: Sequence[Item], agreement: Agreement, rank: int) -> RankPlan:
    """Return the writes of `rank` for its items."""
    planner = _Planner(items, agreement, rank)
    for number, item in enumerate(items):
        planner.take(number, item)
    planner.take_beside()
    return planner.finish()


def is_stored_elsewhere(item: Item, agreement: Agreement) -> bool:
    """Return True if other ranks have their own copy of the whole tensor, and that copy is stored."""
    return item.group != agreement.copies.get(item.key, (item.group,))[0]


class _Group(NamedTuple):
    """The ranks that share a tensor out, and the share of this one. Tensors of one group are dealt together."""

    ranks: tuple[int, ...]
    structures: tuple[int, ...] | None
    shares: int
    share: int


class _Planner:
    def __init__(self, items: Sequence[Item], agreement: Agreement, rank: int) -> None:
        self._items = items
        self._agreement = agreement
        self._rank = rank
        self._writes: list[Write] = []
        self._flags: dict[str, int] = {}
        self._ties: dict[str, list[str]] = {}
        self._common: list[str] = []
        self._own: list[str] = []
        self._spans: set[tuple[int, int]] = set()
        self._lists: dict[_Group, list[int]] = {}
        self._positions: dict[tuple[int, ...], tuple[int, int]] = {}
        self._groups: dict[tuple[tuple[int, ...], tuple[int, ...] | None], _Group] = {}

    def take(self, number: int, item: Item) -> None:
        """Take in one item; items that are shared out wait for `finish`."""
        key = item.key
        if item.tied_to and key not in self._agreement.untied:
            self._ties.setdefault(item.tied_to, []).append(key)
            if item.tied_to in self._agreement.differs:
                self._flags[key] = PER_RANK
        elif key in self._agreement.differs:
            if item.mode is Mode.VALUE:
                self._own.append(key)
            else:
                self._flags[key] = PER_RANK
                self._write_all(number, item)
        elif is_stored_elsewhere(item, self._agreement):
            return
        elif item.mode is Mode.SHARD:
            if item.layout is None:
                self._spans.add((number, number))
            self._write_all(number, item)
        elif item.mode is Mode.MESH:
            self._lists.setdefault(self._group(item), []).append(number)
        elif item.mode is not Mode.BESIDE:
            self._take_alike(number, item)

    def _take_alike(self, number: int, item: Item) -> None:
        """Take an item that all its ranks have alike: share it out, or let the lowest rank write it."""
        position, count = self._position(item.key)
        if item.mode in (Mode.SPLIT, Mode.COMPARE) and count > 1:
            group = _Group((), self._agreement.partial.get(item.key), count, position)
            self._lists.setdefault(group, []).append(number)
        elif position == 0:
            if item.mode is Mode.VALUE:
                self._common.append(item.key)
            else:
                self._spans.add((number, number))
                self._write_all(number, item)

    def take_beside(self) -> None:
        """Write tensors that belong to values wherever the values are written."""
        common, own = set(self._common), set(self._own)
        for number, item in enumerate(self._items):
            if item.mode is Mode.BESIDE and item.owner in common | own:
                self._flags[item.key] = BESIDE_VALUE | (PER_RANK if item.owner in own else 0)
                self._write_all(number, item)

    def finish(self) -> RankPlan:
        """Deal the items that are shared out, and return the plan."""
        for group, numbers in self._lists.items():
            self._deal(numbers, group.shares, group.share)
        return RankPlan(
            tuple(sorted(self._writes, key=lambda write: write.item)),
            tuple([number for number, item in enumerate(self._items) if item.dtype and not item.size_bytes]),
            self._flags,
            {key: tuple(others) for key, others in self._ties.items()},
            tuple(self._common),
            tuple(self._own),
            tuple(self._joined_spans()),
        )

    def _joined_spans(self) -> Iterator[tuple[int, int]]:
        """Yield the spans, with those joined that have no tensor between them."""
        first, last = -1, -1
        for start, stop in sorted(self._spans):
            if first >= 0 and not any(self._items[number].dtype for number in range(last + 1, start)):
                last = max(last, stop)
                continue
            if first >= 0:
                yield first, last
            first, last = start, stop
        if first >= 0:
            yield first, last

    def _position(self, key: str) -> tuple[int, int]:
        """Return the place of this rank among the holders of a key, and the number of holders."""
        numbers = self._agreement.partial.get(key)
        if numbers is None:
            return self._rank, self._agreement.world_size
        if numbers not in self._positions:
            holders = list(self._agreement.holders(key))
            self._positions[numbers] = holders.index(self._rank), len(holders)
        return self._positions[numbers]

    def _group(self, item: Item) -> _Group:
        """Return the group of an item's sharers that have the key. A rank without known sharers writes all its
        boxes."""
        if not item.sharers:
            return _Group((), None, 1, 0)
        numbers = self._agreement.partial.get(item.key)
        place = item.sharers, numbers
        if place not in self._groups:
            member, members = item.sharers[item.position], self._agreement.members
            holders = {members[rank] for rank in self._agreement.holders(item.key)} if members else set()
            ranks = tuple(rank for rank in item.sharers if rank in holders)
            ranks = ranks if member in ranks else (member,)
            self._groups[place] = _Group(ranks, None, len(ranks), ranks.index(member))
        return self._groups[place]

    def _write_all(self, number: int, item: Item) -> None:
        element_bytes = DTYPES[item.dtype][1]
        for held, box in enumerate(item.boxes):
            self._writes += [Write(number, held, chunk) for chunk in chunks_of(box, element_bytes)]

    def _deal(self, numbers: list[int], shares: int, share: int) -> None:
        pieces = [(number, held) for number in numbers for held in range(len(self._items[number].boxes))]
        dealt, dealt_numbers = [], list[int]()
        for number, held in pieces:
            item = self._items[number]
            dealt.append(Dealt(item.boxes[held].sizes, DTYPES[item.dtype][1]))
        for index, start, stop in deal(dealt, shares, share):
            number, held = pieces[index]
            item = self._items[number]
            chunks = chunks_of(item.boxes[held], DTYPES[item.dtype][1], start, stop)
            dealt_numbers.append(number)
            self._writes += [Write(number, held, chunk) for chunk in chunks]
        if dealt_numbers:
            self._spans.add((dealt_numbers[0], dealt_numbers[-1]))
