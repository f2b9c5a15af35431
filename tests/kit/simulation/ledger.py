"""A second account of a log, in plain sets, written without a look at `ckptstore.format.changes.apply`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import NoReturn

from ckptstore.format.changes import Annotate, Claim, Commit, Pin, Remove, Restore, Resumed, StoreState, Unpin
from ckptstore.format.order import MAX_VOIDS, SaveOrder, void_of
from ckptstore.format.record import Record


class Violation(AssertionError):
    """A promise does not hold."""

    def __init__(self, rule: str, text: str) -> None:
        super().__init__(f"{rule}: {text}")
        self.rule = rule


@dataclass
class Ledger:
    """The contents of a store after each of its records, by rules of its own."""

    epoch: int = 0
    source: int | None = None
    """The latest checkpoint when the last claim was made."""
    live: set[int] = field(default_factory=set)
    pinned: set[int] = field(default_factory=set)
    trash: set[int] = field(default_factory=set)
    users: dict[int, set[int]] = field(default_factory=dict)
    """By base the checkpoints that refer to its files."""
    metrics: dict[int, dict[str, float]] = field(default_factory=dict)
    """By place what it was annotated with so far."""
    annotated_by: dict[int, int] = field(default_factory=dict)
    last_save: int = 0
    places: dict[int, int] = field(default_factory=dict)
    """The numbers of whole checkpoints, by those of the thinned ones that have their places."""
    left: list[tuple[SaveOrder, SaveOrder]] = field(default_factory=list)
    """Between which saves nobody may go on."""

    def take(self, record: Record) -> None:
        """Follow one record. Raise Violation when its change is not legal, or the state in it is another one."""
        change = record.change
        epoch = getattr(change, "epoch", None)
        if isinstance(change, Commit):
            epoch = change.entry.epoch if change.thins is None else change.begun_in
        if epoch not in (None, self.epoch):
            self._fail("a fenced job changes nothing", record)
        match change:
            case Claim():
                self.epoch = max(self.epoch, change.above_epoch) + 1
                self.source, self.last_save = self._latest(), 0
            case Commit():
                self._commit(record, change)
            case Remove():
                self._remove(record, change)
            case Pin() | Unpin():
                self._require(self.live, change.numbers, record)
                self.pinned -= {*change.numbers}
                self.pinned |= {*change.numbers} if isinstance(change, Pin) else set()
            case Restore():
                self._restore(record, change)
            case Resumed():
                self.left.append((change.source or SaveOrder(0, 0), SaveOrder(change.epoch, change.next_save)))
            case Annotate():
                self._require(set(map(self.place, self.live | self.trash)), [change.number], record)
                before = self.metrics.get(change.number, {})
                if not change.metrics or not before.keys() <= change.metrics.keys():
                    self._fail("an annotation forgets none", record)
                self.metrics[change.number] = dict(change.metrics)
                self.annotated_by[change.number] = record.number
        if not self._is(record.state):
            self._fail("a state follows from the changes", record, f"it says {record.state}, it should say {self}")

    def _commit(self, record: Record, change: Commit) -> None:
        if change.thins is not None:
            self._thin(record, change, change.thins)
            return
        entry = change.entry
        if 0 < entry.save_number <= self.last_save:
            self._fail("one order of saves", record)
        self.last_save = entry.save_number or self.last_save
        self._require(self.live, (*entry.bases, *change.replaces, *change.drops), record)
        self._check_kept(record, change.drops)
        gone = {*change.replaces, *change.drops} - self.pinned
        self.live = self.live - gone | {record.number}
        self.trash |= gone
        for base in entry.bases:
            self.users.setdefault(base, set()).add(record.number)

    def _thin(self, record: Record, change: Commit, whole: int) -> None:
        self._require(self.live, [whole, *change.entry.bases], record)
        self._check_whole(record, {whole})
        self.places[record.number] = self.places.get(whole, whole)
        self.live = self.live - {whole} | {record.number}
        self.trash.add(whole)
        if whole in self.pinned:
            self.pinned = self.pinned - {whole} | {record.number}
        for base in change.entry.bases:
            self.users.setdefault(base, set()).add(record.number)

    def _check_whole(self, record: Record, thinned: set[int]) -> None:
        if thinned & {self._latest(), self.source}:
            self._fail("what a job resumes from stays whole", record)

    def _latest(self) -> int | None:
        return max(self.live - self.places.keys(), default=None)

    def place(self, number: int) -> int:
        """Return the place of a checkpoint in the order of commits."""
        return self.places.get(number, number)

    def _restore(self, record: Record, change: Restore) -> None:
        self._require(self.trash, change.numbers, record, rule="what is deleted never comes back")
        taken = {self.place(number) for number in change.numbers}
        other = {number for number in self.live if self.place(number) in taken}
        self._check_whole(record, other)
        pins = {self.place(number) for number in other & self.pinned}
        self.trash = self.trash - {*change.numbers} | other
        self.live = self.live - other | {*change.numbers}
        self.pinned -= other
        self.pinned |= {*change.numbers} if change.pin or pins else set()

    def _remove(self, record: Record, change: Remove) -> None:
        trash, drop = {*change.trash}, {*change.drop}
        self._require(self.live, trash, record)
        self._require(self.trash, drop, record)
        self._check_kept(record, drop)
        if trash & self.pinned and not change.unpins:
            self._fail("what is pinned stays", record)
        self.pinned -= trash
        if self._latest() in trash:
            last = max(self.live - trash, key=self.place, default=0)
            higher = {number for number in self.live if self.place(number) > self.place(last)}
            if trash != higher or last in self.places:
                self._fail("the latest goes in a roll back alone", record)
        if any(not self.users.get(number, set()) <= drop for number in drop):
            self._fail("what others refer to stays", record)
        if change.voids is not None:
            self.left.append((change.voids.after, change.voids.before))
        self.live -= trash
        self.trash = self.trash - drop | trash
        self.places = {number: whole for number, whole in self.places.items() if number not in drop}
        left = set(map(self.place, self.live | self.trash))
        self.annotated_by = {place: by for place, by in self.annotated_by.items() if place in left}
        self.users = {base: users - drop for base, users in self.users.items() if base not in drop and users - drop}

    def _check_kept(self, record: Record, gone: Collection[int]) -> None:
        if not self.pinned.isdisjoint(gone):
            self._fail("what is pinned stays", record)
        if self.source in gone:
            self._fail("the resume source stays", record)

    def _require(
        self, there: set[int], numbers: Collection[int], record: Record, *, rule: str = "a change names what is there"
    ) -> None:
        if not there.issuperset(numbers):
            self._fail(rule, record)

    def _is(self, state: StoreState) -> bool:
        return (
            (state.epoch, state.resume_from, state.latest) == (self.epoch, self.source, self._latest())
            and dict(state.thinned) == self.places
            and ({*state.live}, {*state.pinned}, {*state.trash}) == (self.live, self.pinned, self.trash)
            and {base: {*users} for base, users in state.bases.items()} == self.users
            and dict(state.annotated) == self.annotated_by
            and self._is_void_as(state)
        )

    def _is_void_as(self, state: StoreState) -> bool:
        edges = {*chain(*self.left), *chain(*((void.after, void.before) for void in state.void))}
        for epoch, number in edges:
            for order in (SaveOrder(epoch, number - 1), SaveOrder(epoch, number), SaveOrder(epoch, number + 1)):
                is_left = any(low < order < high for low, high in self.left)
                is_void = void_of(state.void, order) is not None
                if is_left > is_void or (is_void > is_left and len(self.left) <= MAX_VOIDS):
                    return False
        return True

    def _fail(self, rule: str, record: Record, text: str = "") -> NoReturn:
        raise Violation(rule, f"record {record.number} is {record.change}{text and '; '}{text}")


@dataclass
class Followed:
    """The checkpoints that the followers with one cursor got, one process after another."""

    begun: int | None = None
    """The number of the newest record when the first one began; None until its cursor is stored."""
    worked: set[int] = field(default_factory=set)
    """The places of checkpoints whose work has ended: the next one was asked for."""
    done: set[int] = field(default_factory=set)
    """The places of those after which the next one came, or none in time."""
    named: set[int] = field(default_factory=set)
    """The places of those of which it was said that they have no turn."""
    at: int = 0
    """The place of the last one that came."""

    def come(self, records: Mapping[int, Record], number: int, where: str) -> int:
        """Note that a checkpoint came, and return its place. Raise Violation unless it is the next one."""
        place = first_place(records, number)
        if place in self.done:
            raise Violation("what is done comes no more", f"{where}: record {number}, place {place}")
        if place < self.at:
            raise Violation("a follower has the order of the commits", f"{where}: {place} after {self.at}")
        if missing := self.due(records, place):
            raise Violation("each commit has its turn", f"{where}: {place} came, and {sorted(missing)} did not")
        self.at = place
        return place

    def due(self, records: Mapping[int, Record], end: int) -> set[int]:
        """Return the places below a number that should have had their turn, and had none."""
        if self.begun is None:
            return set()
        places = {first_place(records, number) for number in records[self.begun].state.live} if self.begun else set()
        places |= {
            number
            for number, record in records.items()
            if number > self.begun and isinstance(record.change, Commit) and record.change.thins is None
        }
        return {place for place in places if place < end} - self.worked - self.named


def first_place(records: Mapping[int, Record], number: int) -> int:
    """Return the number of the whole checkpoint of which this one was made by thinning, or its own."""
    change = records[number].change
    while isinstance(change, Commit) and change.thins is not None:
        number = change.thins
        change = records[number].change
    return number
