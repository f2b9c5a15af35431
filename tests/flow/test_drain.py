"""Fast checkpoints come into the store whole and in order, whatever fails on the way. Most ranks are threads here.

Due are the first save of a job, and then the first of every ten steps; others are drained when somebody waits for them.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from fast_jobs import Jobs, durable, of, resume, save, state_of
from outcomes import end_of
from trees import flip, heard

from ckptstore import CheckpointStore, PendingSave, open_store
from ckptstore.errors import (
    CheckpointDamaged,
    CheckpointGone,
    InvalidInput,
    NotDurable,
    RankFailed,
    StorageFull,
    StorageUnavailable,
    StoreFenced,
)
from ckptstore.events import CheckpointCommitted, DrainEnded, DrainFailed, DrainRecovered, DrainStalled, DrainStarted
from ckptstore.testing import Call, CountCalls, FailAt, KillAt, combine, run_ranks, with_faults

SECONDS = 60
ROUNDS = "ckptstore.extensions.tier.drain.drain_rounds"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{ROUNDS}._FIRST_WAIT_SECONDS", 0.05)
    monkeypatch.setattr(f"{ROUNDS}._LONGEST_WAIT_SECONDS", 0.2)
    monkeypatch.setenv("CKPTSTORE_RETRY_ATTEMPTS", "2")
    monkeypatch.setenv("CKPTSTORE_RETRY_WAIT_INITIAL_SECONDS", "0.01")


def saved(store: CheckpointStore, step: int, rank: int) -> PendingSave:
    """Save a fast checkpoint; what is returned waits for the store."""
    pending = store.save_async(step, state_of(step, rank))
    assert pending.result().step == step
    return pending


def step_of(pending: PendingSave) -> Any:
    """The step of what came into the store in the end."""
    return pending.durable(SECONDS).step


def steps_in(jobs: Jobs) -> list[int]:
    """What is visible in the store, in the order of its records, each whole."""
    with open_store(jobs.root / "store", group="solo") as store:
        found = [*store]
        assert all(checkpoint.verify().ok for checkpoint in found)
        return [checkpoint.step for checkpoint in found]


def names_of(events: list[Any]) -> list[tuple[str, int]]:
    return sorted((type(event).__name__, event.rank) for event in events)


class Gate:
    """A hook at which calls below the checkpoints wait, or fail, while it is shut."""

    def __init__(self, *, fails: bool = False) -> None:
        self.fails = fails
        self.opened, self.reached = threading.Event(), threading.Event()

    def __call__(self, call: Call) -> None:
        where = ("checkpoints/step", "log") if self.fails else ("checkpoints/step",)
        if call.phase == "before" and call.key.startswith(where) and not self.opened.is_set():
            self.reached.set()
            if self.fails:
                raise StorageUnavailable("the bucket is away")
            assert self.opened.wait(SECONDS)


def test_a_drained_checkpoint_is_what_was_certified(jobs: Jobs) -> None:
    def flow(store: CheckpointStore, rank: int) -> Any:
        pending = saved(store, 7, rank)
        found = pending.durable(SECONDS)
        health = store.health()
        assert (health.draining, health.waiting, health.durable_step) == (None, None, 7)
        assert health.not_durable_seconds is health.away_seconds is None
        newest = store._job.log.newest()
        assert newest.entry.save_number == newest.state.save_number == 1
        return pending.result(), found

    with heard(DrainStarted, DrainEnded, CheckpointCommitted) as events:
        (fast, found), (_, other) = jobs.drain("ab", flow)
    assert found == other
    assert (found.files, found.created_at, found.timings) == (fast.files, fast.created_at, fast.timings)
    assert names_of(events) == [
        (name, rank) for name in ("CheckpointCommitted", "DrainEnded", "DrainStarted") for rank in (0, 1)
    ]
    assert steps_in(jobs) == [7]
    for node in "ab":
        for path in jobs.attempts(node):
            path.rename(path.with_name("away"))
    assert jobs.run("ab", resume) == of(7, 0, 1)


def test_one_drains_one_waits_and_a_newer_one_takes_its_place(jobs: Jobs) -> None:
    gate = Gate()

    def flow(store: CheckpointStore, rank: int) -> Any:
        drains = [saved(store, 1, rank)]
        assert gate.reached.wait(SECONDS)
        drains += [saved(store, step, rank) for step in (10, 11, 20)]
        held = sorted(store._job.tier.place.in_use)
        meeting.wait(SECONDS)
        gate.opened.set()
        found = [step_of(drain) for drain in drains]
        return found, [name[:15] for name in held], saved(store, 21, rank)

    meeting = threading.Barrier(2)
    for found, held, last in jobs.drain("ab", flow, hook=gate):
        assert found == [1, 20, 20, 20]
        assert held == ["step-0000000001", "step-0000000020"]  # what waits costs the disk one checkpoint
        assert step_of(last) == 21  # closing drains the newest, though it is not due
    assert steps_in(jobs) == [1, 20, 21]


def test_a_store_that_is_away_is_tried_again_and_sent_nothing_twice(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckptstore.extensions.tier.drain.own_files._GROUP_BYTES", 1)  # each file is noted on its own
    away, calls, written = Gate(fails=True), CountCalls(), threading.Barrier(2)
    away.opened.set()

    def goes_away(call: Call) -> None:
        """After the first file of each rank."""
        is_persisted = (call.phase, call.verb) == ("after", "persist")
        if is_persisted and "-00.distcp" in call.key and "step-0000000001" in call.key:
            if written.wait(SECONDS) == 0:
                away.opened.clear()
            written.wait(SECONDS)

    def flow(store: CheckpointStore, rank: int) -> Any:
        first = saved(store, 1, rank)
        _wait_until(lambda: store.health().away_seconds is not None)
        newer = saved(store, 10, rank)  # training and fast saves go on
        health = store.health()
        assert (health.draining, health.waiting) == (1, 10)
        assert "away" in str(health.error)
        assert health.not_durable_seconds is not None
        seen.wait(SECONDS)
        away.opened.set()
        return step_of(first), step_of(newer), store.health().away_seconds

    seen = threading.Barrier(2)
    with heard(DrainStalled, DrainRecovered, DrainFailed) as events:
        assert jobs.drain("ab", flow, hook=combine(away, calls, goes_away)) == [(1, 10, None)] * 2
    files = [call.key for call in calls.calls if call.verb == "write" and "step-0000000001" in call.key]
    assert len(files) == len(set(files)) > 2
    assert names_of(events) == [(name, rank) for name in ("DrainRecovered", "DrainStalled") for rank in (0, 1)]
    assert steps_in(jobs) == [1, 10]


def harm(jobs: Jobs, node: str, rank: int, damage: str = "flip") -> None:
    """Damage the newest file of a rank on the disk of a node."""
    path = jobs.attempts(node)[-1] / f"state-rank={rank:05d}-00.distcp"
    if damage == "flip":
        flip(path)
        return
    data = path.read_bytes()
    path.unlink()
    if damage == "cut":
        path.write_bytes(data[:-1])


@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_a_damaged_file_fails_its_own_checkpoint_and_no_other(jobs: Jobs, damage: str) -> None:
    def flow(store: CheckpointStore, rank: int) -> Any:
        durable(1)(store, rank)
        pending = saved(store, 2, rank)
        if rank == 1:
            harm(jobs, "b", 1, damage)
        with pytest.raises(CheckpointDamaged, match="is damaged on the disk of b") as caught:
            pending.durable(SECONDS)
        return caught.value.rank, caught.value.file, caught.value.step, step_of(saved(store, 10, rank))

    with heard(DrainFailed) as events:
        assert jobs.drain("ab", flow) == [(1, "state-rank=00001-00.distcp", 2, 10)] * 2
    assert sorted((event.step, event.rank) for event in events) == [(2, 0), (2, 1)]
    assert steps_in(jobs) == [1, 10]
    assert not [*(jobs.root / "store/checkpoints").glob("step-0000000002*")]


@pytest.mark.parametrize("damage", ["flip", "remove"])
def test_with_two_copies_the_partner_has_what_is_damaged_here(
    jobs: Jobs, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    harmed = threading.Barrier(2)

    def flow(store: CheckpointStore, rank: int) -> Any:
        durable(1)(store, rank)
        for step in (2, 3):
            pending = saved(store, step, rank)
            if rank == 1 or step == 3:  # of step 3 a file on both nodes
                harm(jobs, "ab"[rank], 1 if step == 2 else 0, damage if step == 2 else "flip")
            harmed.wait(SECONDS)
            if step == 2:
                assert step_of(pending) == 2
        with pytest.raises(CheckpointDamaged, match=r"rank=00000.* on the disk of a.*; and on b: its CRC"):
            pending.durable(SECONDS)

    assert jobs.drain("ab", flow, copies=2) == [None, None]
    assert "state-rank=00001-00.distcp was sent from a, for it is damaged on b" in caplog.text
    assert steps_in(jobs) == [1, 2]


def test_a_job_that_is_fenced_drains_nothing_more(jobs: Jobs) -> None:
    later = threading.Barrier(2)

    def flow(store: CheckpointStore, rank: int) -> Any:
        durable(1)(store, rank)
        if later.wait(SECONDS) == 0:
            with open_store(jobs.root / "store", group="solo") as other:
                other.resume()
        later.wait(SECONDS)
        with pytest.raises(StoreFenced):
            saved(store, 10, rank).durable(SECONDS)
        return end_of(lambda: store.save(20, state_of(20, rank)))

    assert [type(error) for error in jobs.drain("ab", flow)] == [StoreFenced] * 2
    assert steps_in(jobs) == [1]
    assert len([*(jobs.root / "store/checkpoints").iterdir()]) == 1  # no byte was sent


def test_a_later_save_that_went_to_the_store_directly_supersedes(jobs: Jobs) -> None:
    def flow(store: CheckpointStore, rank: int) -> Any:
        durable(1)(store, rank)
        older = saved(store, 2, rank)
        with patch.object(store._job.tier.place.transfer, "upload", side_effect=StorageFull("no space on the disk")):
            assert save(3)(store, rank).is_durable
        return step_of(older)

    with heard(DrainEnded) as events:
        assert jobs.drain("a", flow) == [3]
    assert [(event.step, event.is_superseded, event.size_bytes) for event in events[1:]] == [(2, True, 0)]
    assert steps_in(jobs) == [1, 3]


def test_the_cap_of_a_node_holds_for_its_ranks_together(jobs: Jobs) -> None:
    rate, began = 1_000_000, threading.Barrier(2)

    def flow(store: CheckpointStore, rank: int) -> float:
        began.wait(SECONDS)
        before = time.monotonic()
        store.save_async(1, {"own": torch.full((125_000,), float(rank))}).durable(SECONDS)
        return time.monotonic() - before

    assert min(jobs.drain("aa", flow, drain_bytes_per_second=rate)) >= 2 * 4 * 125_000 / rate


def test_closing_gives_up_cleanly_what_it_cannot_finish(jobs: Jobs) -> None:
    away = Gate(fails=True)
    away.opened.set()

    def flow(store: CheckpointStore, rank: int) -> Any:
        durable(1)(store, rank)
        meeting.wait(SECONDS)
        away.opened.clear()
        return saved(store, 2, rank)

    meeting = threading.Barrier(2)
    with heard(DrainFailed) as events:
        drains = jobs.drain("ab", flow, hook=away, close_seconds=0.5)
    for drain in drains:
        with pytest.raises(NotDurable, match="stays on the disks"):
            drain.durable()
    assert [event.step for event in events] == [2, 2]
    assert steps_in(jobs) == [1]


def test_closing_ends_a_drain_that_would_take_for_ever(jobs: Jobs) -> None:
    """At that rate the files take minutes, so the ranks would be found hanging."""
    drains = jobs.drain("ab", lambda store, rank: saved(store, 1, rank), drain_bytes_per_second=1000, close_seconds=0.2)
    assert [type(end_of(drain.durable)) for drain in drains] == [NotDurable] * 2
    assert steps_in(jobs) == []


def test_a_commit_whose_answer_is_lost_is_one_commit(jobs: Jobs) -> None:
    """The create has its effect, its answer is lost, and the log cannot be read for a while."""
    lost = FailAt("create log/*", effect="after", skip=1, times=1)
    blind = FailAt(lambda call: lost.struck == 1 and call.verb in ("read", "list", "create"), times=12)
    with heard(DrainStalled, DrainRecovered, CheckpointCommitted) as events:
        flow = lambda store, rank: saved(store, 1, rank).durable(SECONDS).number  # noqa: E731
        assert jobs.drain("a", flow, hook=combine(lost, blind)) == [2]
    assert blind.struck == 12
    assert [type(event) for event in events].count(CheckpointCommitted) == 1
    assert steps_in(jobs) == [1]


def test_what_may_be_committed_is_never_removed(jobs: Jobs) -> None:
    """What breaks right behind the commit is no error of ckptstore's, so that nothing is known of the record."""
    bug = FailAt("create log/*", RuntimeError("a bug"), effect="after", skip=1)
    (error,) = jobs.drain("a", lambda store, rank: end_of(lambda: step_of(saved(store, 1, rank))), hook=bug)
    assert (type(error), error.committed) == (RankFailed, None)
    assert "RuntimeError: a bug" in str(error)
    assert steps_in(jobs) == [1]


def test_a_rolled_back_store_takes_nothing_that_the_roll_back_voided(jobs: Jobs) -> None:
    def flow(store: CheckpointStore, rank: int) -> Any:
        durable(1, 10)(store, rank)
        voided = saved(store, 11, rank)
        with open_store(jobs.root / "store", group="solo") as other:
            other.roll_back(1)
        with pytest.raises(CheckpointGone, match="void: the store was rolled back"):
            voided.durable(SECONDS)

    assert jobs.drain("a", flow) == [None]
    assert steps_in(jobs) == [1]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # of threads; that is what this is about
def test_a_forked_child_drains_nothing(jobs: Jobs) -> None:
    gate = Gate()

    def flow(store: CheckpointStore, rank: int) -> Any:
        drains = [saved(store, 1, rank), saved(store, 2, rank)]
        assert gate.reached.wait(SECONDS)
        child = os.fork()
        if child == 0:
            errors = [end_of(lambda drain=drain: drain.durable(SECONDS)) for drain in drains]
            os._exit(0 if [type(error) for error in errors] == [NotDurable] * 2 and "fork" in str(errors[0]) else 1)
        gate.opened.set()
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), step_of(drains[0])

    assert jobs.drain("a", flow, hook=gate) == [(0, 1)]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_what_was_drained_during_later_saves_is_deleted_by_its_own_process_at_the_end(jobs: Jobs) -> None:
    gate = Gate()

    def flow(store: CheckpointStore, rank: int) -> None:
        first, *_ = [saved(store, step, rank) for step in (1, 2, 3)]
        gate.opened.set()
        assert step_of(first) == 1
        _wait_until(lambda: str(jobs.attempts("a")[0].name) not in store._job.tier.place.in_use)
        child = os.fork()
        if child == 0:
            store.close()
            os._exit(0)
        os.waitpid(child, 0)
        assert [path.name[:15] for path in jobs.attempts("a")] == ["step-0000000001", "step-0000000003"]

    jobs.drain("a", flow, hook=gate, keep=1)
    assert [path.name[:15] for path in jobs.attempts("a")] == ["step-0000000003"]


def test_what_is_not_this_jobs_is_refused(jobs: Jobs) -> None:
    (fast,) = jobs.drain("a", lambda store, rank: saved(store, 1, rank).result())

    def flow(store: CheckpointStore, rank: int) -> None:
        durable(2)(store, rank)
        with pytest.raises(InvalidInput, match="save 1 of epoch 1, and this job has epoch 2"):
            store._state_saver._drainer.offer(fast._files.certificate)

    assert jobs.drain("a", flow) == [None]


def test_ranks_that_ask_at_different_moments_agree(jobs: Jobs) -> None:
    """Rank 0 waits for one that is not due before the next is there, rank 1 after it."""

    def flow(store: CheckpointStore, rank: int) -> Any:
        durable(1)(store, rank)
        pending, newer = saved(store, 2, rank), None
        for turn in (0, 1):
            if turn == 1:
                newer = saved(store, 3, rank)
            if rank == turn:
                with suppress(TimeoutError):
                    pending.durable(0.0)
        return step_of(pending), newer and step_of(newer)

    assert jobs.drain("ab", flow) == [(3, 3)] * 2
    assert steps_in(jobs) == [1, 3]


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 12))])
def test_any_order_of_saves_wishes_and_faults_ends_alike_on_all_ranks(jobs: Jobs, seed: int) -> None:
    """Three ranks at their own pace, and a store of which every tenth request fails, or is answered in vain."""
    plan = random.Random(seed)
    wanted: list[int] = []
    for _ in range(12):  # the next step that is due, or the next one
        last = wanted[-1] if wanted else 0
        wanted.append(100 * (last // 100 + 1) if plan.random() < 0.6 else last + 1)
    asked = {step for step in wanted if plan.random() < 0.2}
    faults, lock = random.Random(seed), threading.Lock()

    def fails(call: Call) -> None:
        with lock:
            is_hit = call.key.startswith(("checkpoints", "log")) and not calm.is_set() and faults.random() < 0.05
        if is_hit:
            raise StorageUnavailable(f"{call.verb} {call.key} fails {call.phase} it is done")

    def flow(store: CheckpointStore, rank: int) -> Any:
        pace = random.Random(100 * seed + rank)
        drains = []
        for step in wanted:
            time.sleep(pace.random() * 0.05)
            drains.append(saved(store, step, rank))
            if step in asked:
                time.sleep(pace.random() * 0.05)
                with suppress(TimeoutError):
                    drains[-1].durable(0.0)
        assert store.finish_by(SECONDS)
        meeting.wait(SECONDS)
        calm.set()
        return drains, store._job.tier.place

    calm, meeting = threading.Event(), threading.Barrier(3)
    ends = jobs.drain("abc", flow, hook=fails, close_seconds=SECONDS)
    outcomes = [[step_of(drain) for drain in drains] for drains, _ in ends]
    assert outcomes[0] == outcomes[1] == outcomes[2]
    assert all(found >= step for step, found in zip(wanted, outcomes[0], strict=True))
    assert outcomes[0][-1] == wanted[-1]
    assert not any(place.in_use for _, place in ends)
    assert steps_in(jobs) == sorted(set(outcomes[0]))


TIMEOUT_SECONDS = 3.0


def drain_and_die(path: Path) -> Any:
    """Rank 1 is killed in a write of the drain; what rank 0 hears of it, and after how many seconds."""
    rank = int(os.environ["RANK"])
    jobs = Jobs(path, options={"rank_timeout_seconds": TIMEOUT_SECONDS})
    hook = KillAt("write* checkpoints/*", when="during") if rank == 1 else None
    store = jobs.open(rank, "ab", "start")
    with store if hook is None else with_faults(store, hook) as store:
        pending, began = saved(store, 1, rank), time.monotonic()
        error = end_of(lambda: pending.durable(SECONDS))
        store._deadline.set(0.1)
    return error.ranks, str(error), time.monotonic() - began


def test_a_killed_rank_ends_the_drain_with_its_name_and_nothing_visible(jobs: Jobs) -> None:
    (ranks, text, seconds), _ = run_ranks(2, drain_and_die, jobs.root, expect_killed=[1])
    assert ranks == (1,)
    assert "Rank 1 gave no sign of life" in text
    assert seconds < 10 * TIMEOUT_SECONDS
    assert steps_in(jobs) == []


def _wait_until(is_there: Callable[[], bool]) -> None:
    until = time.monotonic() + SECONDS
    while not is_there():
        assert time.monotonic() < until
        time.sleep(0.01)
