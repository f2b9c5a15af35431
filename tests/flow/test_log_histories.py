"""Random histories of a log: jobs, zombies and command lines over a storage that crashes them, loses their replies and
delivers their requests late, checked at every record against a model of a few plain sets.

A history follows from its seed: `run_history(random.Random(seed))` plays it again. Between any two storage calls of an
actor others may act, it may die, its call may fail before or after it took effect, or take effect much later.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptstore.config import RetryConfig
from ckptstore.errors import (
    AccessDenied,
    CheckpointGone,
    CkptstoreError,
    FileMissing,
    InvalidInput,
    StorageFull,
    StorageUnavailable,
    StoreFenced,
)
from ckptstore.format.changes import (
    EMPTY,
    Change,
    CheckpointEntry,
    Claim,
    Commit,
    Pin,
    Remove,
    Restore,
    Resumed,
    StoreState,
    Unpin,
)
from ckptstore.format.layout import HINT_KEY, parse_record_key
from ckptstore.format.order import SaveOrder, void_of
from ckptstore.format.record import Record
from ckptstore.log import Log
from ckptstore.storage.base import StoredFile

RETRY = RetryConfig(retry_attempts=3, retry_wait_initial_seconds=1e-9, retry_wait_max_seconds=1e-9)
NO_RETRY = RetryConfig(retry_attempts=1)
HISTORIES_IN_BLOCK, BLOCKS, OVERLAPPING_BLOCKS = 500, 4, 2
"""Three thousand histories in all. The simulation runs the whole library through more of them."""


class Crash(BaseException):
    """The process is gone."""


@dataclass
class Model:
    """What a store holds, and which changes are legal, in plain sets: written without a look at `apply`."""

    epoch: int = 0
    source: int | None = None
    live: set[int] = field(default_factory=set)
    pinned: set[int] = field(default_factory=set)
    trash: set[int] = field(default_factory=set)
    users: dict[int, set[int]] = field(default_factory=dict)
    last_save: int = 0
    left: list[tuple[tuple[int, int], tuple[int, int]]] = field(default_factory=list)
    """Between which saves nobody may go on."""

    def take(self, number: int, change: Change) -> None:
        match change:
            case Claim():
                self.epoch, self.source = self.epoch + 1, max(self.live, default=None)
                self.last_save = 0
            case Commit(entry, replaces, drops):
                assert entry.epoch == self.epoch, "a commit of another epoch"
                assert entry.save_number > self.last_save, "saves of an epoch out of order"
                self.last_save = entry.save_number
                assert {*entry.bases, *replaces, *drops} <= self.live
                assert self.pinned.isdisjoint(drops), "retention took a pinned one"
                assert self.source not in drops, "retention took the resume source"
                gone = {*replaces, *drops} - self.pinned
                self.live = self.live - gone | {number}
                self.trash |= gone
                for base in entry.bases:
                    self.users.setdefault(base, set()).add(number)
            case Remove(trash, drop, epoch):
                assert epoch in (None, self.epoch), "a removal of another epoch"
                self._remove(set(trash), set(drop))
            case Pin(numbers, epoch) | Unpin(numbers, epoch):
                assert epoch in (None, self.epoch), "a pin of another epoch"
                assert set(numbers) <= self.live
                self.pinned = self.pinned | {*numbers} if isinstance(change, Pin) else self.pinned - {*numbers}
            case Restore(numbers, pin, epoch):
                assert epoch in (None, self.epoch), "a restore of another epoch"
                assert set(numbers) <= self.trash, "what was deleted came back"
                self.trash -= set(numbers)
                self.live |= set(numbers)
                self.pinned |= set(numbers) if pin else set()
            case Resumed(epoch, source):
                assert epoch == self.epoch, "a job that was fenced has resumed"
                self.left.append((source or (0, 0), (epoch, change.next_save)))

    def _remove(self, trash: set[int], drop: set[int]) -> None:
        assert trash <= self.live - self.pinned
        assert drop <= self.trash - {self.source}
        if max(self.live, default=0) in trash:
            stays = max(self.live - trash)
            assert trash == {number for number in self.live if number > stays}, "no roll back, and the latest is gone"
        else:
            assert self.source not in trash
        assert all(self.users.get(number, set()) <= drop for number in drop), "a base went before its users"
        self.live -= trash
        self.trash = self.trash - drop | trash
        self.users = {base: users - drop for base, users in self.users.items() if base not in drop and users - drop}

    def matches(self, state: StoreState) -> bool:
        return (
            (state.epoch, state.resume_from, state.latest) == (self.epoch, self.source, max(self.live, default=None))
            and state.live == self.live
            and state.pinned == self.pinned
            and state.trash.keys() == self.trash
            and dict(state.bases) == self.users
            and all(
                (void_of(state.void, order) is not None) == any(low < order < high for low, high in self.left)
                for order in (SaveOrder(epoch, number) for epoch in range(self.epoch + 2) for number in range(12))
            )
        )


@dataclass
class World:
    """The files, the requests that are still on their way, and the model, which takes each record as it lands."""

    chance: random.Random
    trouble: float
    """How likely a call is to go wrong."""
    files: dict[str, bytes] = field(default_factory=dict)
    late: list[Callable[[], object]] = field(default_factory=list)
    model: Model = field(default_factory=Model)
    newest: Record | None = None
    landed: dict[str, int] = field(default_factory=dict)
    """How often each write id is in the log."""
    conflicts: int = 0
    """How many creates came second."""
    actors: list[Actor] = field(default_factory=list)
    busy: list[Actor] = field(default_factory=list)

    def create(self, key: str, data: bytes) -> bool:
        if key in self.files:
            self.conflicts += 1
            return False
        record = Record.decode(data, parse_record_key(key) or 0)
        assert record.number == (self.newest.number + 1 if self.newest else 1), "the numbers have a gap"
        assert record.previous == (self.newest.sha256 if self.newest else ""), "the chain is broken"
        self.model.take(record.number, record.change)
        assert self.model.matches(record.state), (record, self.model)
        self.files[key], self.newest = data, record
        self.landed[record.write_id] = self.landed.get(record.write_id, 0) + 1
        return True

    def write(self, key: str, data: bytes) -> None:
        assert key == HINT_KEY
        self.files[key] = data

    def read(self, key: str) -> bytes:
        if key not in self.files:
            raise FileMissing(key, file=key)
        return self.files[key]

    def deliver(self) -> None:
        """One of the late requests arrives."""
        if self.late:
            with suppress(FileMissing):  # nobody waits for the answer to a read any more
                self.late.pop(self.chance.randrange(len(self.late)))()

    def pause(self, _network: Network) -> None:
        """Between two calls of an actor, at times another one does one thing from beginning to end."""
        if self.chance.random() >= 0.08:
            return
        idle = [actor for actor in self.actors if actor not in self.busy]
        if idle and len(self.busy) < 3:
            self.chance.choice(idle).act()


class Network:
    """One actor's way to the files; everything that can go wrong goes wrong here."""

    uri = "history://"

    def __init__(self, world: World) -> None:
        self.world = world
        self.down = 0
        """How many calls from now on fail: an outage, in which nothing can be settled either."""
        self.tried: list[str] = []
        """The write ids of records that were sent."""

    def _call(self, effect: Callable[[], Any], partly: Callable[[], object] = lambda: None) -> Any:
        chance = self.world.chance
        self.world.pause(self)
        if self.world.late and chance.random() < 0.2:
            self.world.deliver()
        if self.down:
            self.down -= 1
            raise StorageUnavailable("an outage")
        if chance.random() >= self.world.trouble:
            return effect()
        match chance.choice(["nothing", "refused", "part", "whole", "later"]):
            case "refused":
                raise chance.choice([AccessDenied("refused"), StorageFull("refused")])
            case "part":
                partly()
            case "whole":
                effect()
            case "later":
                self.world.late.append(effect)
        if chance.random() < 0.4:
            raise Crash
        if chance.random() < 0.3:
            self.down = chance.randrange(1, 9)
        raise StorageUnavailable("timed out")

    def create(self, key: str, data: bytes) -> bool:
        record = Record.decode(data, parse_record_key(key) or 0)
        if type(record.change).__name__ != "Noop":
            self.tried.append(record.write_id)
        return bool(self._call(lambda: self.world.create(key, data)))

    def write(self, key: str, views: Sequence[memoryview]) -> None:
        data = b"".join(views)
        half = data[: len(data) // 2]
        self._call(lambda: self.world.write(key, data), lambda: self.world.write(key, half))

    def read(self, key: str) -> bytes:
        return bytes(self._call(lambda: self.world.read(key)))

    def read_into(self, key: str, offset: int, views: Sequence[memoryview], *, version: str | None = None) -> None:
        raise AssertionError("records are read whole")

    def stat(self, key: str) -> StoredFile:
        size_bytes = len(self._call(lambda: self.world.read(key)))
        return StoredFile(key, size_bytes, float("nan"))  # times decide nothing here

    def list(self, prefix: str) -> Iterator[StoredFile]:
        raise AssertionError("the log is never listed")

    def delete(self, keys: Sequence[str]) -> None:
        raise AssertionError("nothing of the log is ever deleted")

    def close(self) -> None:
        """Nothing is held."""


class Actor:
    """A process that does one thing after another, dies at times and starts again."""

    expects: tuple[type[CkptstoreError], ...] = (StorageUnavailable, AccessDenied, StorageFull, StoreFenced)
    """What it may be told; anything else, a fork or a damaged record for instance, ends the history."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.chance = world.chance
        self.promises: list[tuple[tuple[str, ...], str | None, set[int]]] = []
        """What was sent by each action, what of it was acknowledged, and how often it may be in the log."""
        self.start()

    def start(self) -> None:
        self.network = Network(self.world)
        self.log = Log(self.network, retry=self.chance.choice([RETRY, NO_RETRY]), num_threads=1)

    def act(self) -> None:
        """Do one thing, and hold the log to what it said about it."""
        self.world.busy.append(self)
        self.network.tried = []
        decide = self.next_decision()
        expected: set[int] = set()
        record: Record | None = None
        try:
            record = self.log.append(decide)
        except Crash:
            expected = {0, 1}
            self.start_after(Crash())
        except CkptstoreError as error:
            if not isinstance(error, self.expects):
                raise
            expected = {0, 1} if error.committed is None else {int(error.committed)}
            self.start_after(error)
        else:
            expected = {1 if record else 0}
            self.done(record)
        self.world.busy.remove(self)
        self.promises.append((tuple(self.network.tried), record.write_id if record else None, expected))
        self.check()

    def check(self) -> None:
        """What the log promised holds from the moment of the answer on, whatever arrives later."""
        for tried, write_id, expected in self.promises:
            counts = {found: self.world.landed.get(found, 0) for found in tried}
            assert sum(counts.values()) in expected, f"{counts} are in the log, the caller was told {expected}"
            assert write_id is None or counts[write_id] == 1

    def next_decision(self) -> Callable[[Record | None], Change | None]:
        raise NotImplementedError

    def start_after(self, error: BaseException) -> None:
        """Go on after an error; a crash is a new process."""
        if isinstance(error, Crash):
            self.start()

    def done(self, record: Record | None) -> None:
        """Learn from a record that was written."""


class Job(Actor):
    """A training job. One that was fenced mostly goes on as if nothing had happened: a zombie."""

    def start(self) -> None:
        super().start()
        self.epoch: int | None = None

    def start_after(self, error: BaseException) -> None:
        if isinstance(error, Crash) or (isinstance(error, StoreFenced) and self.chance.random() < 0.3):
            self.start()

    def done(self, record: Record | None) -> None:
        if record and isinstance(record.change, Claim):
            self.epoch = record.state.epoch

    def next_decision(self) -> Callable[[Record | None], Change | None]:
        if self.epoch is None:
            return lambda _: Claim("token", 2)
        return self.chance.choice([self.commit, self.commit, self.commit, self.prune, self.pin, self.resumed])

    def resumed(self, newest: Record | None) -> Change:
        assert newest is not None
        assert self.epoch is not None
        live = self.log.records(newest.state.live)
        source = self.chance.choice([None, *(record.entry.order for record in live)])
        return Resumed(self.epoch, source, next_save=newest.state.save_number + 1)

    def commit(self, newest: Record | None) -> Change:
        assert newest is not None
        assert self.epoch is not None
        state, chance = newest.state, self.chance
        live = [*state.live]
        step = chance.randrange(8)
        replaces = tuple(record.number for record in self.log.records(live[-4:]) if record.entry.step == step)
        keep = {*live[-chance.randrange(1, 4) :], *state.pinned, state.resume_from, *replaces}
        bases = tuple(live[-1:]) if chance.random() < 0.2 else ()
        entry = CheckpointEntry(
            step=step,
            epoch=self.epoch,
            attempt=f"step-{step:010d}-e{self.epoch:04d}-0123abcd",
            manifest_sha256="0" * 64,
            kind="directory",
            world_size=1,
            size_bytes=1,
            num_files=1,
            created_at=0.0,
            bases=bases,
            save_number=state.save_number + chance.randrange(1, 3),
        )
        return Commit(entry, replaces, tuple(number for number in live if number not in keep))

    def prune(self, newest: Record | None) -> Change | None:
        assert newest is not None
        drop = newest.state.droppable(number for number in newest.state.trash if self.chance.random() < 0.7)
        return Remove(drop=drop, epoch=self.epoch) if drop else None

    def pin(self, newest: Record | None) -> Change | None:
        assert newest is not None
        return Pin((newest.state.latest,), self.epoch) if newest.state.latest else None


class CommandLine(Actor):
    """People: pins, roll backs, prunes, and changes that no rule allows. Each command is a new process."""

    expects = (*Actor.expects, InvalidInput, CheckpointGone)

    def next_decision(self) -> Callable[[Record | None], Change | None]:
        self.start()
        return self.chance.choice(
            [self.pin, self.unpin, self.roll_back, self.restore, self.prune, self.mischief, self.mischief]
        )

    def pin(self, newest: Record | None) -> Change | None:
        return Pin((self.chance.choice([*newest.state.live]),)) if newest and newest.state.live else None

    def unpin(self, newest: Record | None) -> Change | None:
        return Unpin(tuple(newest.state.pinned)) if newest and newest.state.pinned else None

    def roll_back(self, newest: Record | None) -> Change | None:
        live = [*newest.state.live] if newest else []
        return Remove(trash=tuple(live[self.chance.randrange(1, len(live)) :])) if len(live) > 1 else None

    def restore(self, newest: Record | None) -> Change | None:
        trash = [*newest.state.trash] if newest else []
        return Restore((self.chance.choice(trash),), pin=self.chance.random() < 0.3) if trash else None

    def prune(self, newest: Record | None) -> Change | None:
        drop = newest.state.droppable(newest.state.trash) if newest else ()
        return Remove(drop=drop) if drop else None

    def mischief(self, newest: Record | None) -> Change:
        state = newest.state if newest else EMPTY
        known = [*state.live, *state.trash, *state.trash, state.resume_from or 1, newest.number + 1 if newest else 2]

        def numbers() -> tuple[int, ...]:
            return tuple({self.chance.choice(known) for _ in range(self.chance.randrange(3))})

        return self.chance.choice(
            [
                Remove(trash=numbers()),
                Remove(drop=numbers()),
                Remove(numbers(), numbers()),
                Pin(numbers()),
                Restore(numbers()),
            ]
        )


@dataclass
class Turnstile(World):
    """The same, but the actors overlap call by call: each has a thread, and one of them runs at a time."""

    gates: dict[str, threading.Semaphore] = field(default_factory=dict)
    paused: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    failures: list[BaseException] = field(default_factory=list)

    def pause(self, _network: Network) -> None:
        self.paused.release()
        self.gates[threading.current_thread().name].acquire()

    def run(self, num_actions: int) -> None:
        """Let every actor do so many things, in an order of calls that the seed decides."""
        threads = [
            threading.Thread(target=self._live, args=(actor, num_actions), name=f"{index}", daemon=True)
            for index, actor in enumerate(self.actors)
        ]
        self.gates = {thread.name: threading.Semaphore(0) for thread in threads}
        for thread in threads:
            thread.start()
        while threads and not self.failures:
            thread = self.chance.choice(threads)
            self.gates[thread.name].release()
            self.paused.acquire()
            threads = [thread for thread in threads if thread.name in self.gates]
        if self.failures:
            raise self.failures[0]

    def _live(self, actor: Actor, num_actions: int) -> None:
        name = threading.current_thread().name
        self.gates[name].acquire()
        try:
            for _ in range(num_actions):
                actor.act()
        except BaseException as error:
            self.failures.append(error)
        finally:
            del self.gates[name]
            self.paused.release()


def run_history(chance: random.Random, *, num_actions: int = 14) -> World:
    """Play one history and check it; returns where it ended."""
    world = World(chance, trouble=chance.choice([0.0, 0.03, 0.1, 0.25]))
    world.actors = [Job(world), Job(world), CommandLine(world)]
    for _ in range(num_actions):
        chance.choice(world.actors).act()
        if chance.random() < 0.1:
            garble_hint(world)
        if chance.random() < 0.15:
            check_reader(world)
    check_end(world)
    return world


def run_overlapping(chance: random.Random, *, num_actions: int = 4) -> World:
    """Play one history in which all that is done overlaps."""
    world = Turnstile(chance, trouble=chance.choice([0.0, 0.03, 0.1]))
    world.actors = [Job(world), Job(world), CommandLine(world)]
    world.run(num_actions)
    check_end(world)
    return world


def check_end(world: World) -> None:
    """Whatever is still on its way arrives, and everything that was said still holds."""
    while world.late:
        world.deliver()
    for actor in world.actors:
        actor.check()
    check_reader(world)
    if world.chance.random() < 0.2:  # each record was checked when it landed
        assert Log(Quiet(world), retry=NO_RETRY, num_threads=1).verify_chain() == []


class Quiet(Network):
    """A way to the files on which nothing goes wrong."""

    def _call(self, effect: Callable[[], Any], partly: Callable[[], object] = lambda: None) -> Any:
        return effect()


def garble_hint(world: World) -> None:
    """Lose the hint or tear it."""
    data = world.files.pop(HINT_KEY, b"")
    if data and world.chance.random() < 0.5:
        world.files[HINT_KEY] = data[: len(data) * world.chance.randrange(8) // 8]


def check_reader(world: World) -> None:
    """Anybody who looks sees the newest record, and the latest checkpoint, whatever the hint says."""
    log = Log(Quiet(world), retry=NO_RETRY, num_threads=1)
    newest, latest = log.newest(), log.latest()
    assert (newest and newest.sha256) == (world.newest and world.newest.sha256)
    assert (latest.number if latest else None) == max(world.model.live, default=None)


@pytest.fixture(autouse=True)
def _no_time_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retries neither sleep nor log: there are ten thousands of them."""
    monkeypatch.setattr(time, "sleep", lambda _seconds: None)
    monkeypatch.setattr(logging.getLogger("ckptstore"), "disabled", True)


@pytest.mark.parametrize("block", range(BLOCKS))
def test_histories(block: int) -> None:
    for seed in range(block * HISTORIES_IN_BLOCK, (block + 1) * HISTORIES_IN_BLOCK):
        try:
            run_history(random.Random(seed))
        except BaseException as error:
            error.add_note(f"run_history(random.Random({seed}))")
            raise


@pytest.mark.parametrize("block", range(OVERLAPPING_BLOCKS))
def test_overlapping_histories(block: int) -> None:
    for seed in range(block * HISTORIES_IN_BLOCK, (block + 1) * HISTORIES_IN_BLOCK):
        try:
            run_overlapping(random.Random(seed))
        except BaseException as error:
            error.add_note(f"run_overlapping(random.Random({seed}))")
            raise


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.randoms(use_true_random=False))
def test_histories_that_shrink(chance: random.Random) -> None:
    run_history(chance)


def test_the_histories_reach_what_they_are_for() -> None:
    kinds: dict[str, int] = {}
    longest = conflicts = 0
    for seed in range(500):
        world = run_history(random.Random(seed))
        conflicts += world.conflicts
        longest = max(longest, world.newest.number if world.newest else 0)
        for key, data in world.files.items():
            if number := parse_record_key(key):
                name = type(Record.decode(data, number).change).__name__
                kinds[name] = kinds.get(name, 0) + 1
    assert kinds.keys() == {"Claim", "Commit", "Remove", "Pin", "Unpin", "Restore", "Resumed", "Noop"}
    assert min(kinds.values()) >= 20
    assert longest >= 15
    assert conflicts >= 100
    assert sum(run_overlapping(random.Random(seed)).conflicts for seed in range(100)) >= 40
