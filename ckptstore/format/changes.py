"""The state of a store and its changes: a small state machine over pure values.

`apply` holds every rule about changes of a store: which jobs may still write, and which checkpoints may be trashed or
dropped. This module knows no storages, clocks or files; `ckptstore.format.record` puts changes into records, and
`ckptstore.log` puts records into a storage.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ckptstore.errors import CheckpointGone, InvalidInput, StoreFenced
from ckptstore.format.encoding import shortened
from ckptstore.format.entry import CheckpointEntry, check_metrics
from ckptstore.format.layout import Attempt
from ckptstore.format.order import BEGINNING, SaveOrder, Void, with_void
from ckptstore.format.ranges import MAX_LISTED, Numbers


@dataclass(frozen=True, slots=True)
class Claim:
    """A job takes the store over: its epoch is one above the highest, and fences every lower one."""

    start_token: str
    """Equal on all ranks of one start of a job, new for every start."""
    world_size: int
    above_epoch: int = 0
    """An epoch above which the new one must lie too: a copy of a store continues above the epochs in copied names."""

    def __post_init__(self) -> None:
        if self.world_size < 1 or not self.start_token:
            raise InvalidInput(f"A claim needs a start token and a world size above 0, and this is {self!r}")


@dataclass(frozen=True, slots=True)
class Commit:
    """A checkpoint becomes live, under the number of the record that carries this."""

    entry: CheckpointEntry
    replaces: tuple[int, ...] = ()
    """Live checkpoints of the same step. They go to the trash, except pinned ones, which stay live."""
    drops: tuple[int, ...] = ()
    """Live checkpoints that retention moves to the trash. None of them is pinned or the resume source."""
    reasons: Mapping[int, str] = field(default_factory=dict)
    """Short reasons for some of `drops`."""
    thins: int | None = None
    """The live checkpoint of which this is a thinned one: that goes to the trash, and this takes its place in the order
    of checkpoints, and its pin. None for a new checkpoint."""

    @property
    def begun_in(self) -> int:
        """The writer epoch in which its directory was begun."""
        return Attempt.of(self.entry.attempt).epoch


@dataclass(frozen=True, slots=True)
class Remove:
    """Live checkpoints go to the trash, and checkpoints in the trash are dropped for good.

    If `trash` has the latest one, this is a roll back: it takes all live checkpoints above one that stays, or all.
    """

    trash: tuple[int, ...] = ()
    drop: tuple[int, ...] = ()
    epoch: int | None = None
    """The writer epoch of the job that removes; None for a command line, which fences nobody."""
    reason: str = ""
    voids: Void | None = None
    """The fast checkpoints that a roll back makes void, since they are newer than its target."""
    unpins: bool = False
    """True if `trash` may have pinned ones, which lose their pins in the same moment."""


@dataclass(frozen=True, slots=True)
class Pin:
    """Live checkpoints are kept until they are unpinned. Pinning twice is no error."""

    numbers: tuple[int, ...]
    epoch: int | None = None


@dataclass(frozen=True, slots=True)
class Unpin:
    """Live checkpoints are no longer pinned. One that was not pinned is no error."""

    numbers: tuple[int, ...]
    epoch: int | None = None


@dataclass(frozen=True, slots=True)
class Restore:
    """Checkpoints in the trash become live again, and with `pin` are pinned in the same moment."""

    numbers: tuple[int, ...]
    pin: bool = True
    epoch: int | None = None


@dataclass(frozen=True, slots=True)
class Resumed:
    """A job has resumed: fast checkpoints that are newer than its source are void, except its own from now on.

    So nobody resumes from the saves of a job that goes on saving to the disks of its nodes after it was fenced.
    """

    epoch: int
    """The writer epoch of the job that has resumed."""
    source: SaveOrder | None
    """The checkpoint that it resumed from, fast or committed; None if it found none and started from the beginning."""
    attempt: str = ""
    """The attempt of the source, for people; empty for none."""
    next_save: int = 1
    """The number that the job's next save gets."""

    def __post_init__(self) -> None:
        if self.attempt and Attempt.parse(self.attempt) is None:
            raise InvalidInput(f"{shortened(self.attempt)!r} is not the name of an attempt directory")

    @property
    def voids(self) -> Void:
        """The saves that are void from now on."""
        return Void(self.source or BEGINNING, SaveOrder(self.epoch, self.next_save))


@dataclass(frozen=True, slots=True)
class Annotate:
    """A checkpoint, live or in the trash, has more metrics than its save gave it."""

    number: int
    """Its place: that of the whole one, if it is thinned, so that all forms of it have the same metrics."""
    metrics: Mapping[str, float]
    """All that it was annotated with so far, those of earlier annotations included: readers look at the last one. They
    take the place of metrics of the save with the same names."""
    epoch: int | None = None
    """The writer epoch of the job that annotates; None for any other process, which fences nobody."""

    def __post_init__(self) -> None:
        if not self.metrics:
            raise InvalidInput("The change has no metric")
        check_metrics(self.metrics)


@dataclass(frozen=True, slots=True)
class Noop:
    """Nothing changes. It takes a number, so that a record whose fate was unknown cannot have it."""


Change = Claim | Commit | Remove | Pin | Unpin | Restore | Resumed | Annotate | Noop


RESUMED_FROM = "the running job resumed from it"
"""The reason for which a resume source stays."""


@dataclass(frozen=True, kw_only=True)
class StoreState:
    """The state of a store after a record. Checkpoints go by the numbers of the records that committed them."""

    epoch: int = 0
    """The highest writer epoch, 0 before the first claim."""
    resume_from: int | None = None
    """The latest checkpoint at the time of that claim. Never dropped before the next claim."""
    live: Numbers = field(default_factory=Numbers)
    pinned: Numbers = field(default_factory=Numbers)
    """Part of `live`."""
    trash: Mapping[int, int] = field(default_factory=dict)
    """The removed checkpoints that are not dropped: number -> number of the record that removed it."""
    bases: Mapping[int, Numbers] = field(default_factory=dict)
    """The checkpoints, live or in the trash, that refer to files of another one: base -> those that refer to it."""
    annotated: Mapping[int, int] = field(default_factory=dict)
    """The places of the checkpoints, live or in the trash, that were annotated, each with the number of the last record
    that did it."""
    save_number: int = 0
    """The highest number of a save that was committed in this epoch; 0 when there is none."""
    void: tuple[Void, ...] = ()
    """The intervals of the order of saves in which a fast checkpoint is void; in order and disjoint."""
    thinned: Mapping[int, int] = field(default_factory=dict)
    """The thinned checkpoints, live or in the trash, each with the number of the whole one whose place it has."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Fields that this version does not know; kept."""

    @property
    def latest(self) -> int | None:
        """The number of the latest checkpoint, None if none is live. A thinned one is never the latest."""
        return self.live.without(self.thinned).highest if self.thinned else self.live.highest

    def place(self, number: int) -> int:
        """Return the place of a checkpoint in the order of commits: its number, or that of the whole one."""
        return self.thinned.get(number, number)

    def live_at(self, number: int) -> int | None:
        """Return the live checkpoint at the place of a number: that one, or what it was thinned to; None if none is."""
        if number in self.live:
            return number
        place = self.place(number)
        return next((other for other in self.live if self.place(other) == place), None) if self.thinned else None

    def in_order(self, numbers: Iterable[int] | None = None) -> list[int]:
        """Return the live checkpoints, or these numbers, in the order of their places."""
        found = list(self.live if numbers is None else numbers)
        return sorted(found, key=self.place) if self.thinned else sorted(found)

    def protected(self, *, latest: int | None) -> dict[int, str]:
        """Return the numbers that retention keeps, with reasons. `latest` is, or is about to be, the latest."""
        reasons = dict.fromkeys(self.pinned, "pinned")
        reasons |= {} if self.resume_from is None else {self.resume_from: RESUMED_FROM}
        return reasons | ({} if latest is None else {latest: "the latest"})

    def droppable(self, expired: Iterable[int]) -> tuple[int, ...]:
        """Return those of `expired` that a `Remove` may drop now, in ascending order: in the trash, held by nothing.

        `expired` are the numbers whose grace period is over. A base is dropped together with the last checkpoint that
        refers to it, or after it.
        """
        dropped = {number for number in expired if number in self.trash and number != self.resume_from}
        while held := {base for base in dropped if not dropped.issuperset(self.bases.get(base, ()))}:
            dropped -= held
        return tuple(sorted(dropped))


EMPTY = StoreState()


def apply(state: StoreState, number: int, change: Change) -> StoreState:
    """Return the state after the record `number` with this change.

    Raises StoreFenced when the change carries an epoch that is not the highest one, CheckpointGone when it names a
    checkpoint that no longer exists, InvalidInput when it breaks another rule, which the message states.
    """
    match change:
        case Noop():
            return state
        case Claim():
            epoch = max(state.epoch, change.above_epoch) + 1
            return replace(state, epoch=epoch, resume_from=state.latest, save_number=0)
        case Commit(thins=None):
            _check_epoch(state, change.entry.epoch)
            return _commit(state, number, change)
        case Commit():
            _check_epoch(state, change.begun_in)
            return _thin(state, number, change)
        case Remove():
            _check_epoch(state, change.epoch)
            return _remove(state, number, change)
        case Pin() | Unpin():
            _check_epoch(state, change.epoch)
            _check_named(change.numbers)
            _check_live(state, change.numbers)
            pinned = state.pinned.without(change.numbers)
            return replace(state, pinned=Numbers([*pinned, *change.numbers]) if isinstance(change, Pin) else pinned)
        case Restore():
            _check_epoch(state, change.epoch)
            return _restore(state, number, change)
        case Resumed():
            _check_epoch(state, change.epoch)
            return _resumed(state, change)
        case Annotate():
            _check_epoch(state, change.epoch)
            return _annotate(state, number, change)


def _commit(state: StoreState, number: int, change: Commit) -> StoreState:
    if 0 < change.entry.save_number <= state.save_number:
        raise InvalidInput(
            f"{change.entry.order} cannot be committed, for save {state.save_number} of this epoch has been",
            step=change.entry.step,
        )
    _check_live(state, change.entry.bases)
    _check_live(state, change.replaces)
    _check_removable(state, change.drops)
    replaced = [other for other in change.replaces if other not in state.pinned]
    after = _joined(_to_trash(state, number, {*replaced, *change.drops}), number, change.entry)
    return replace(after, save_number=change.entry.save_number or state.save_number)


def _joined(state: StoreState, number: int, entry: CheckpointEntry) -> StoreState:
    bases = dict(state.bases)
    for base in set(entry.bases):
        bases[base] = bases.get(base, Numbers()).with_number(number)
    return replace(state, live=state.live.with_number(number), bases=bases)


def _thin(state: StoreState, number: int, change: Commit) -> StoreState:
    thins, entry = change.thins or 0, change.entry
    if entry.thinned is None or change.replaces or change.drops:
        raise InvalidInput("A thinned checkpoint says what was dropped, and takes the place of one other")
    _check_live(state, (thins, *entry.bases))
    if thins in (state.latest, state.resume_from):
        why = "the latest" if thins == state.latest else RESUMED_FROM
        raise InvalidInput(f"The checkpoint with number {thins} cannot be thinned: {why}", step=entry.step)
    after = _joined(_to_trash(state, number, (thins,)), number, entry)
    is_pinned = thins in state.pinned
    return replace(
        after,
        pinned=state.pinned.without((thins,)).with_number(number) if is_pinned else state.pinned,
        thinned={**state.thinned, number: state.place(thins)},
    )


def _remove(state: StoreState, number: int, change: Remove) -> StoreState:
    _check_named((*change.trash, *change.drop))
    _check_droppable(state, change.drop)
    _check_live(state, change.trash)
    if not change.unpins:
        _check_unpinned(state, change.trash)
    is_roll_back = state.latest is not None and state.latest in change.trash
    if is_roll_back:
        _check_roll_back(state, change.trash)
    last = SaveOrder(state.epoch + 1, 0)  # behind every save that can be made before the next claim
    if change.voids is not None and not (is_roll_back and change.voids.before <= last):
        raise InvalidInput("Only a roll back voids fast checkpoints, and none of an epoch that is still to come")
    after = _to_trash(state, number, change.trash)
    dropped = set(change.drop)
    rest = {base: users.without(dropped) for base, users in after.bases.items() if base not in dropped}
    thinned = {other: whole for other, whole in after.thinned.items() if other not in dropped}
    trash = {other: by for other, by in after.trash.items() if other not in dropped}
    known = {*trash, *thinned.values()}
    return replace(
        after,
        pinned=state.pinned.without(change.trash) if change.unpins else state.pinned,
        trash=trash,
        annotated={place: by for place, by in after.annotated.items() if place in known or place in after.live},
        bases={base: users for base, users in rest.items() if users},
        thinned=thinned,
        void=after.void if change.voids is None else with_void(after.void, change.voids),
    )


def _resumed(state: StoreState, change: Resumed) -> StoreState:
    if change.next_save <= state.save_number:
        raise InvalidInput(f"The next save cannot be {change.next_save}, for save {state.save_number} is committed")
    try:
        return replace(state, void=with_void(state.void, change.voids))
    except ValueError as error:
        raise InvalidInput(f"Epoch {change.epoch} cannot have resumed from {change.source}: {error}") from None


def _restore(state: StoreState, number: int, change: Restore) -> StoreState:
    _check_named(change.numbers)
    _check_in_trash(state, change.numbers)
    places = {state.place(other) for other in change.numbers}
    if len(places) < len(set(change.numbers)):
        raise InvalidInput(f"Of a checkpoint and the thinned one of it, only one can be live: {change.numbers}")
    displaced = [other for other in state.live if state.place(other) in places] if state.thinned else []
    if state.latest in displaced or state.resume_from in displaced:
        raise InvalidInput("The latest checkpoint, and what the running job resumed from, are not exchanged")
    after = _to_trash(state, number, displaced)
    pinned = state.pinned.without(displaced)
    taken_over = {state.place(other) for other in displaced if other in state.pinned}
    pins = [other for other in change.numbers if change.pin or state.place(other) in taken_over]
    return replace(
        after,
        live=Numbers([*after.live, *change.numbers]),
        pinned=Numbers([*pinned, *pins]),
        trash={other: by for other, by in after.trash.items() if other not in change.numbers},
    )


def _annotate(state: StoreState, number: int, change: Annotate) -> StoreState:
    if state.place(change.number) != change.number:
        raise InvalidInput(f"Number {change.number} is thinned: its metrics are those of its place")
    if change.number not in state.trash and change.number not in state.thinned.values():
        _check_live(state, (change.number,))
    if len(state.annotated) >= MAX_LISTED and change.number not in state.annotated:
        raise InvalidInput(f"A store has at most {MAX_LISTED} annotated checkpoints")
    return replace(state, annotated={**state.annotated, change.number: number})


def _to_trash(state: StoreState, number: int, gone: Collection[int]) -> StoreState:
    if not gone:
        return state
    return replace(state, live=state.live.without(gone), trash={**state.trash, **dict.fromkeys(sorted(gone), number)})


def _check_epoch(state: StoreState, epoch: int | None) -> None:
    if epoch is None or epoch == state.epoch:
        return
    if epoch > state.epoch:
        raise StoreFenced(f"The writer epoch {epoch} was never claimed in this store; the highest is {state.epoch}")
    raise StoreFenced(
        f"A newer job has claimed the store: its writer epoch is {state.epoch}, this job's is {epoch}",
        hint="Stop this job, or start it again so that it claims the store",
    )


def _check_named(numbers: Collection[int]) -> None:
    if not numbers:
        raise InvalidInput("The change names no checkpoint")


def _check_live(state: StoreState, numbers: Iterable[int]) -> None:
    for number in numbers:
        if number in state.trash:
            raise CheckpointGone(f"The checkpoint with number {number} was removed by record {state.trash[number]}")
        if number not in state.live:
            raise CheckpointGone(f"There is no checkpoint with number {number}, or it was removed long ago")


def _check_removable(state: StoreState, numbers: Collection[int]) -> None:
    _check_live(state, numbers)
    _check_unpinned(state, numbers)
    if state.resume_from in numbers:
        raise InvalidInput(f"The checkpoint with number {state.resume_from} is what the running job resumed from")


def _check_unpinned(state: StoreState, numbers: Collection[int]) -> None:
    pinned = sorted(number for number in numbers if number in state.pinned)
    if pinned:
        raise InvalidInput(f"Checkpoints that would go are pinned, by number: {pinned}", hint="Unpin them first")


def _check_roll_back(state: StoreState, numbers: Collection[int]) -> None:
    stays = state.in_order(state.live.without(numbers))
    if stays and state.place(stays[-1]) > min(map(state.place, numbers)):
        raise InvalidInput("Only a roll back removes the latest checkpoint: with all above its target, and no others")
    if stays and stays[-1] in state.thinned:
        raise InvalidInput(f"The checkpoint with number {stays[-1]} is thinned, and cannot become the latest")


def _check_in_trash(state: StoreState, numbers: Iterable[int]) -> None:
    for number in numbers:
        if number in state.live:
            raise InvalidInput(f"The checkpoint with number {number} is live, not in the trash")
        if number not in state.trash:
            raise CheckpointGone(f"The checkpoint with number {number} is not in the trash any more")


def _check_droppable(state: StoreState, numbers: Collection[int]) -> None:
    _check_in_trash(state, numbers)
    dropped = set(numbers)
    for number in numbers:
        if number == state.resume_from:
            raise InvalidInput(f"The checkpoint with number {number} is what the running job resumed from")
        users = sorted(user for user in state.bases.get(number, ()) if user not in dropped)
        if users:
            raise InvalidInput(f"The checkpoint with number {number} holds files of those with the numbers {users}")
