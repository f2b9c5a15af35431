"""The writes of a rank, from its items and the agreement of all ranks, and the dealing of tensors that several ranks
have alike, so that each writes its share. Pure, and the same on every rank.

A training job saves the same structure again and again, so a memo keeps what follows from keys, dtypes, shapes and
places alone. It is used only if these are equal, and holds no tensor of the state.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

from ckptstore.format.digest import BLOCK_BYTES
from ckptstore.runtime.collector import collector_paused
from ckptstore.state.index.items import Item, Mode, Structure, without_digests
from ckptstore.state.index.part import BESIDE_VALUE, DTYPES, PER_RANK
from ckptstore.state.tensors.boxes import Box, Sizes, boxes_of_range, granule, within
from ckptstore.state.write.agree import Agreement, Negotiator, member_of
from ckptstore.state.write.describe import Described
from ckptstore.state.write.outlining import Outliner, RankStructures
from ckptstore.state.write.replicas import is_stored_elsewhere

Made = TypeVar("Made")


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
    derived: dict[str, tuple[Any, Any]] = field(default_factory=dict, init=False, compare=False, repr=False)
    """Results of `derive`."""

    def derive(self, name: str, made_for: object, make: Callable[[], Made]) -> Made:
        """Return the last result of `make` under that name, if it was made for an equal object; else call `make`.

        For what follows from the plan, its items and that object alone, for the next save with the same plan. It must
        hold no tensor.
        """
        return _remembered(self.derived, name, made_for, make)


def _remembered(cache: dict[str, tuple[Any, Any]], name: str, made_for: object, make: Callable[[], Made]) -> Made:
    last = cache.get(name)
    if last is None or last[0] != made_for:
        last = cache[name] = made_for, make()  # one assignment, so that no error comes between the two
    made: Made = last[1]
    return made


@collector_paused()
def plan_rank(items: Sequence[Item], agreement: Agreement, rank: int) -> RankPlan:
    """Return the writes of `rank` for its items."""
    planner = _Planner(items, agreement, rank)
    for number, item in enumerate(items):
        planner.take(number, item)
    planner.take_beside()
    return planner.finish()


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
        elif is_stored_elsewhere(item, self._agreement.copies):
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
        pieces = [
            (number, held, box, DTYPES[self._items[number].dtype][1])
            for number in numbers
            for held, box in enumerate(self._items[number].boxes)
        ]
        dealt_numbers: list[int] = []
        for index, start, stop in deal([Dealt(box.sizes, each) for _, _, box, each in pieces], shares, share):
            number, held, box, element_bytes = pieces[index]
            dealt_numbers.append(number)
            self._writes += [Write(number, held, chunk) for chunk in chunks_of(box, element_bytes, start, stop)]
        if dealt_numbers:
            self._spans.add((dealt_numbers[0], dealt_numbers[-1]))


MAX_CHUNK_BYTES = 1 << 30
"""The most bytes of a chunk. A larger box is cut, so that several files and threads share it and frames stay below 4
GiB."""
_MAX_IMBALANCE = 0.01


class Dealt(NamedTuple):
    """A tensor, or the box of one, that is shared out."""

    sizes: Sizes
    element_bytes: int
    is_whole: bool = False
    """True if it may not be cut, however large it is."""

    @property
    def size_bytes(self) -> int:
        volume = self.element_bytes
        for size in self.sizes:
            volume *= size
        return volume


def deal(items: Sequence[Dealt], shares: int, share: int) -> Iterator[tuple[int, int, int]]:
    """Yield (index, first element, last element + 1) of each item in one of the shares, in order.

    The items lie on a line that is cut into stretches of equal bytes. A cut inside an item below 1 MiB moves to its
    nearer end, one inside a larger item to a row, so that no share is off by more than that or by 1 %. There are no
    shares below 1 MiB: the last ones stay empty instead, so that small tensors that all ranks need are on few ranks.
    """
    sizes = [item.size_bytes for item in items]
    ends = list(accumulate(sizes))
    total = ends[-1] if ends else 0
    shares = min(shares, max(1, total // BLOCK_BYTES))
    if share >= shares:
        return
    low = _cut(items, sizes, ends, total * share // shares, total // shares)
    high = _cut(items, sizes, ends, total * (share + 1) // shares, total // shares)
    start, first = low
    stop, last = high
    for index in range(start, min(stop + 1, len(items))):
        begin = first if index == start else 0
        end = last if index == stop else sizes[index] // items[index].element_bytes
        if begin < end:
            yield index, begin, end


def _cut(items: Sequence[Dealt], sizes: list[int], ends: list[int], at_bytes: int, share_bytes: int) -> tuple[int, int]:
    """Return the item and element before which the line is cut near a place."""
    index = bisect_right(ends, at_bytes)
    if index == len(items):
        return index, 0
    item, into_bytes = items[index], at_bytes - (ends[index] - sizes[index])
    if sizes[index] < BLOCK_BYTES or item.is_whole:
        return (index, 0) if into_bytes * 2 < sizes[index] else (index + 1, 0)
    most = max(1, int(share_bytes * _MAX_IMBALANCE) // item.element_bytes)
    rows = granule(item.sizes, most)
    element = (into_bytes // item.element_bytes + rows // 2) // rows * rows
    volume = sizes[index] // item.element_bytes
    return (index, element) if element < volume else (index + 1, 0)


def chunks_of(box: Box, element_bytes: int, start: int = 0, stop: int | None = None) -> list[Box]:
    """Return the boxes, counted as `box` is, that hold its elements from `start` to `stop`, none above 1 GiB."""
    volume = box.volume
    stop = volume if stop is None else stop
    if start == 0 and stop == volume and volume * element_bytes <= MAX_CHUNK_BYTES:
        return [box] if volume else []
    most = MAX_CHUNK_BYTES // element_bytes
    rows = granule(box.sizes, most)
    step = most // rows * rows
    found = []
    for first in range(start, stop, step):
        found += [within(inner, box) for inner in boxes_of_range(box.sizes, first, min(first + step, stop))]
    return found


@dataclass(slots=True)
class SaveMemo:
    """The results that a save of a store would compute again though nothing has changed; for one save at a time."""

    negotiator: Negotiator = field(default_factory=Negotiator)
    _cache: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    _turn: int = 0

    def next_turn(self) -> int:
        """Return another number for each save of this process; it selects the copies to check."""
        self._turn += 1
        return self._turn

    @collector_paused()
    def cached(self, name: str, made_for: object, make: Callable[[], Made]) -> Made:
        """Return the last result of `make` under that name, if it was made for an equal object; else call `make`."""
        return _remembered(self._cache, name, made_for, make)

    @collector_paused()
    def plan(self, found: Described, agreement: Agreement, rank: int) -> RankPlan:
        """Return the result of `plan_rank`; the last plan itself, if the agreement and the items are equal but for the
        digests of items: the writes of a rank depend on digests only through the agreement."""
        items = found.items

        def make() -> RankPlan:
            if agreement.world_size == 1:  # else the leader has received them
                self.negotiator.structures = RankStructures.of(
                    [Structure.of(items, found.modules, found.paths)], (0,), (member_of(items),)
                )
            return plan_rank(items, agreement, rank)

        return self.cached("plan", (without_digests(items), found.modules, found.paths, agreement, rank), make)

    def outliner(self, agreement: Agreement) -> Outliner:
        """Return the outliner of the leader, once it has a plan; the last one itself, if the structures of all ranks
        and the agreement are equal."""
        structures = self.negotiator.structures

        def make() -> Outliner:
            return Outliner(structures, differs=agreement.differs, untied=agreement.untied, copies=agreement.copies)

        return self.cached("outliner", (id(structures), agreement), make)  # which the cached outliner keeps alive
