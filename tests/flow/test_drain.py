"""Fast checkpoints come into the store whole and in order, whatever fails on the way. Most ranks are threads here."""

from __future__ import annotations

import os
import random
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from draining import FILES_OF_A_RANK, Rank, board_at, opened, payload
from outcomes import end_of
from thread_ranks import in_threads
from trees import heard, make_tree

from ckptstore import open_store
from ckptstore.errors import (
    CheckpointDamaged,
    CheckpointGone,
    InvalidInput,
    NotDurable,
    RankFailed,
    StorageUnavailable,
    StoreFenced,
)
from ckptstore.events import CheckpointCommitted, DrainEnded, DrainFailed, DrainRecovered, DrainStalled, DrainStarted
from ckptstore.fast.certificate import Certificate
from ckptstore.fast.drain import drain_rounds, own_files
from ckptstore.format.manifest import sha256_of
from ckptstore.saving import transaction
from ckptstore.saving.directory_shard import directory_of
from ckptstore.saving.log_publisher import LogPublisher
from ckptstore.testing import Call, CountCalls, FailAt, KillAt, combine, run_ranks

SECONDS = 60


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drain_rounds, "_FIRST_WAIT_SECONDS", 0.05)
    monkeypatch.setattr(drain_rounds, "_LONGEST_WAIT_SECONDS", 0.2)


def on_ranks(size: int, path: Path, script: Callable[[Rank], Any], **more: Any) -> list[Any]:
    """What the script returns on each rank, or raises."""
    board = board_at(path)

    def run(rank: int) -> Any:
        with opened(path / "store", path / "disks", rank=rank, size=size, board=board, **more) as job:
            return script(job)

    ends = in_threads(size, run)
    assert not [thread.name for thread in threading.enumerate() if thread.name == "ckptstore-drain"]
    return ends


def steps_in(path: Path) -> list[int]:
    """What is visible in the store, each whole."""
    with open_store(path / "store", group="solo") as store:
        found = [*store]
        assert all(checkpoint.verify().ok for checkpoint in found)
        return sorted(checkpoint.step for checkpoint in found)


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


def test_a_drained_checkpoint_is_what_was_certified(tmp_path: Path) -> None:
    def script(rank: Rank) -> Any:
        certificate = rank.fast(7, 3)
        record = rank.drainer.offer(certificate).result(SECONDS)
        health = rank.drainer.health()
        assert (health.draining, health.waiting, health.durable_step) == (None, None, 7)
        assert health.not_durable_since is health.away_since is None
        return certificate, record

    with heard(DrainStarted, DrainEnded, CheckpointCommitted) as events:
        (certificate, record), (_, other) = on_ranks(2, tmp_path, script)
    assert record.number == other.number
    assert record.entry.save_number == record.state.save_number == 3
    manifest = (tmp_path / "store" / record.entry.prefix / "ckptstore.json").read_bytes()
    assert manifest == certificate.manifest_data
    assert record.entry.manifest_sha256 == sha256_of(manifest)
    assert record.entry.metrics == {"loss": 0.125}
    for rank in range(2):
        for index in range(FILES_OF_A_RANK):
            name = f"part-{index}-rank={rank:05d}.bin"
            assert (tmp_path / "store" / record.entry.prefix / name).read_bytes() == payload(7, rank, index, 1000)
    kinds = sorted((type(event).__name__, event.rank) for event in events)
    assert kinds == [(name, rank) for name in ("CheckpointCommitted", "DrainEnded", "DrainStarted") for rank in (0, 1)]
    assert steps_in(tmp_path) == [7]


def test_one_drains_one_waits_and_a_newer_one_takes_its_place(tmp_path: Path) -> None:
    gate = Gate()

    def script(rank: Rank) -> Any:
        drains = [rank.offer(1, 1)]
        assert gate.reached.wait(SECONDS)
        drains += [rank.offer(2, 2), rank.offer(3, 3, is_due=False), rank.offer(4, 4)]
        place = rank.job.tier.place
        held = sorted(place.in_use)
        meeting.wait(SECONDS)
        gate.opened.set()
        steps = [drain.result(SECONDS).entry.step for drain in drains]
        last = rank.offer(5, 5, is_due=False)
        assert not last.done()
        return steps, [drain.superseded_by is not None for drain in drains], [name[:15] for name in held], last

    meeting = threading.Barrier(2)
    ends = on_ranks(2, tmp_path, script, hook=gate)
    for steps, superseded, held, last in ends:
        assert steps == [1, 4, 4, 4]
        assert superseded == [False, True, True, False]
        assert held == ["step-0000000001", "step-0000000004"]  # what waits costs the disk one checkpoint
        assert last.result().entry.step == 5  # closing drains the newest, though it is not due
    assert steps_in(tmp_path) == [1, 4, 5]


def test_a_store_that_is_away_is_tried_again_and_sent_nothing_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_files, "_GROUP_BYTES", 1)  # each file is noted on its own
    away, calls, written = Gate(fails=True), CountCalls(), threading.Barrier(2)
    away.opened.set()

    def goes_away(call: Call) -> None:
        """After the first file of each rank."""
        if call.phase == "after" and call.verb == "persist" and "part-0" in call.key and "step-0000000001" in call.key:
            if written.wait(SECONDS) == 0:
                away.opened.clear()
            written.wait(SECONDS)

    def script(rank: Rank) -> Any:
        first = rank.offer(1, 1)
        _wait_until(lambda: rank.drainer.health().away_since is not None)
        newer = rank.offer(2, 2)  # training and fast saves go on
        health = rank.drainer.health()
        assert (health.draining, health.waiting) == (1, 2)
        assert "away" in str(health.error)
        assert health.not_durable_since is not None
        seen.wait(SECONDS)
        away.opened.set()
        return first.result(SECONDS).entry.step, newer.result(SECONDS).entry.step, rank.drainer.health().away_since

    seen = threading.Barrier(2)
    with heard(DrainStalled, DrainRecovered, DrainFailed) as events:
        assert on_ranks(2, tmp_path, script, hook=combine(away, calls, goes_away)) == [(1, 2, None)] * 2
    files = [call.key for call in calls.calls if call.verb == "write" and "step-0000000001" in call.key]
    assert len(files) == len(set(files)) == 2 * FILES_OF_A_RANK
    assert sorted((type(event).__name__, event.rank) for event in events) == [
        *(("DrainRecovered", rank) for rank in (0, 1)),
        *(("DrainStalled", rank) for rank in (0, 1)),
    ]
    assert steps_in(tmp_path) == [1, 2]


def flip(rank: Rank, certificate: Certificate, name: str, damage: str = "flip") -> None:
    """Damage a file on the disk of this rank's node."""
    place = rank.job.tier.place
    path = place.disk.storage.local_path(certificate.attempt.key(name))
    data = bytearray(path.read_bytes())
    data[500] ^= 1
    if damage == "remove":
        path.unlink()
    else:
        path.write_bytes(data if damage == "flip" else data[:-1])


@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_a_damaged_file_fails_its_own_checkpoint_and_no_other(tmp_path: Path, damage: str) -> None:
    def script(rank: Rank) -> Any:
        certificate, place = rank.fast(1, 1), rank.job.tier.place
        if place.members.rank == 1:
            flip(rank, certificate, "part-1-rank=00001.bin", damage)
        with pytest.raises(CheckpointDamaged, match="is damaged on the disk of node1") as caught:
            rank.drainer.offer(certificate).result(SECONDS)
        newer = rank.offer(2, 2).result(SECONDS).entry.step
        return caught.value.rank, caught.value.file, caught.value.step, newer

    with heard(DrainFailed) as events:
        assert on_ranks(2, tmp_path, script) == [(1, "part-1-rank=00001.bin", 1, 2)] * 2
    assert sorted((event.step, event.rank) for event in events) == [(1, 0), (1, 1)]
    assert steps_in(tmp_path) == [2]
    assert not [*(tmp_path / "store/checkpoints").glob("step-0000000001*")]


@pytest.mark.parametrize("damage", ["flip", "remove"])
def test_with_two_copies_the_partner_has_what_is_damaged_here(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    stored, damaged = threading.Barrier(2), threading.Barrier(2)

    def script(rank: Rank) -> Any:
        certificates, place = [rank.fast(1, 1), rank.fast(2, 2)], rank.job.tier.place
        stored.wait(SECONDS)
        if place.members.rank == 1:
            flip(rank, certificates[0], "part-1-rank=00001.bin", damage)
        flip(rank, certificates[1], "part-2-rank=00000.bin")  # on both nodes
        damaged.wait(SECONDS)
        assert rank.drainer.offer(certificates[0]).result(SECONDS).entry.step == 1
        with pytest.raises(CheckpointDamaged, match=r"part-2.* on the disk of node0.*; and on node1: its CRC"):
            rank.drainer.offer(certificates[1]).result(SECONDS)

    assert on_ranks(2, tmp_path, script, copies=2) == [None, None]
    assert "part-1-rank=00001.bin was sent from node0, for it is damaged on node1" in caplog.text
    assert steps_in(tmp_path) == [1]


def test_a_job_that_is_fenced_drains_nothing_more(tmp_path: Path) -> None:
    later = threading.Barrier(2)

    def script(rank: Rank) -> Any:
        rank.offer(1, 1).result(SECONDS)
        if later.wait(SECONDS) == 0:
            with open_store(tmp_path / "store", group="solo") as store:
                store._job.claim(None)
        later.wait(SECONDS)
        with pytest.raises(StoreFenced):
            rank.offer(2, 2).result(SECONDS)
        assert isinstance(rank.offer(3, 3).error(), StoreFenced)  # at once
        return rank.job.is_fenced

    assert on_ranks(2, tmp_path, script) == [True] * 2
    assert steps_in(tmp_path) == [1]
    assert len([*(tmp_path / "store/checkpoints").iterdir()]) == 1  # no byte was sent


def test_a_later_save_that_went_to_the_store_directly_supersedes(tmp_path: Path) -> None:
    make_tree(tmp_path / "tree", {"a": b"a"})

    def script(rank: Rank) -> Any:
        older, place = rank.fast(1, 1), rank.job.tier.place
        assert place is not None
        rank.job.next_save_number()
        request, shard = directory_of(rank.job, 2, tmp_path / "tree")
        transaction.save(rank.job.group, LogPublisher(rank.job), shard, request)
        drain = rank.drainer.offer(older)
        return drain.result(SECONDS).entry.step, drain.superseded_by is not None

    with heard(DrainEnded) as events:
        assert on_ranks(1, tmp_path, script) == [(2, True)]
    assert [(event.step, event.is_superseded, event.size_bytes) for event in events] == [(1, True, 0)]
    assert steps_in(tmp_path) == [2]


def test_the_cap_of_a_node_holds_for_its_ranks_together(tmp_path: Path) -> None:
    def script(rank: Rank) -> float:
        certificate = rank.fast(1, 1, size_bytes=100_000)
        began.wait(SECONDS)
        before = time.monotonic()
        rank.drainer.offer(certificate).result(SECONDS)
        return time.monotonic() - before

    began, rate = threading.Barrier(2), 400_000
    ends = on_ranks(2, tmp_path, script, bytes_per_second=rate, node="one".format)
    assert min(ends) >= 2 * FILES_OF_A_RANK * 100_000 / rate


def test_closing_gives_up_cleanly_what_it_cannot_finish(tmp_path: Path) -> None:
    away = Gate(fails=True)
    away.opened.set()

    def script(rank: Rank) -> Any:
        rank.offer(1, 1).result(SECONDS)
        meeting.wait(SECONDS)
        away.opened.clear()
        return rank.offer(2, 2, is_due=False)

    meeting = threading.Barrier(2)
    with heard(DrainFailed) as events:
        drains = on_ranks(2, tmp_path, script, hook=away, close_seconds=0.5)
    for drain in drains:
        assert isinstance(drain.error(), NotDurable)
        assert "stays on the disks" in str(drain.error())
    assert [event.step for event in events] == [2, 2]
    assert steps_in(tmp_path) == [1]


def test_closing_ends_a_drain_that_would_take_for_ever(tmp_path: Path) -> None:
    """At that rate the files take an hour, so the ranks would be found hanging."""

    def script(rank: Rank) -> Any:
        return rank.offer(1, 1, size_bytes=1 << 20)

    drains = on_ranks(2, tmp_path, script, bytes_per_second=1000, close_seconds=0.2)
    assert [type(drain.error()) for drain in drains] == [NotDurable] * 2
    assert steps_in(tmp_path) == []


def test_a_commit_whose_answer_is_lost_is_one_commit(tmp_path: Path) -> None:
    """The create has its effect, its answer is lost, and the log cannot be read for a while."""
    lost = FailAt("create log/*", effect="after", skip=1, times=1)
    blind = FailAt(lambda call: lost.struck == 1 and call.verb in ("read", "list", "create"), times=12)

    def script(rank: Rank) -> int:
        return rank.offer(1, 1).result(SECONDS).number

    with heard(DrainStalled, DrainRecovered, CheckpointCommitted) as events:
        assert on_ranks(1, tmp_path, script, hook=combine(lost, blind)) == [2]
    assert blind.struck == 12
    assert [type(event) for event in events].count(CheckpointCommitted) == 1
    assert steps_in(tmp_path) == [1]


def test_what_may_be_committed_is_never_removed(tmp_path: Path) -> None:
    """What breaks right behind the commit is no error of ckptstore's, so that nothing is known of the record."""

    def script(rank: Rank) -> Any:
        with pytest.raises(RankFailed, match="RuntimeError: a bug") as caught:
            rank.offer(1, 1).result(SECONDS)
        return caught.value.committed

    bug = FailAt("create log/*", RuntimeError("a bug"), effect="after", skip=1)
    assert on_ranks(1, tmp_path, script, hook=bug) == [None]
    assert steps_in(tmp_path) == [1]


def test_a_rolled_back_store_takes_nothing_that_the_roll_back_voided(tmp_path: Path) -> None:
    def script(rank: Rank) -> Any:
        rank.offer(1, 1).result(SECONDS)
        rank.offer(2, 2).result(SECONDS)
        voided = rank.fast(3, 3)
        with open_store(tmp_path / "store", group="solo") as store:
            store.roll_back(1)
        with pytest.raises(CheckpointGone, match="void: the store was rolled back"):
            rank.drainer.offer(voided).result(SECONDS)

    assert on_ranks(1, tmp_path, script) == [None]
    assert steps_in(tmp_path) == [1]


def test_a_forked_child_drains_nothing(tmp_path: Path) -> None:
    gate = Gate()

    def script(rank: Rank) -> Any:
        drain, newer = rank.offer(1, 1), rank.fast(2, 2)
        assert gate.reached.wait(SECONDS)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of threads; that is what this is about
            child = os.fork()
        if child == 0:
            errors = rank.drainer.offer(newer).error(), end_of(lambda: drain.result(SECONDS))
            os._exit(0 if [type(error) for error in errors] == [NotDurable] * 2 and "fork" in str(errors[1]) else 1)
        gate.opened.set()
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), drain.result(SECONDS).entry.step

    assert on_ranks(1, tmp_path, script, hook=gate) == [(0, 1)]


def test_what_is_not_this_jobs_or_not_in_order_is_refused(tmp_path: Path) -> None:
    def first(rank: Rank) -> Any:
        return rank.fast(1, 1)

    (certificate,) = on_ranks(1, tmp_path, first)

    def second(rank: Rank) -> Any:
        with pytest.raises(InvalidInput, match="save 1 of epoch 1, and this job has epoch 2"):
            rank.drainer.offer(certificate)
        rank.offer(3, 2)
        with pytest.raises(InvalidInput, match="offered after"):
            rank.offer(2, 1)
        return rank.drainer.finish(SECONDS)

    assert on_ranks(1, tmp_path, second) == [True]
    assert steps_in(tmp_path) == [3]


def test_ranks_that_ask_at_different_moments_agree(tmp_path: Path) -> None:
    """Rank 0 waits for one that is not due before the next is there, rank 1 after it."""

    def script(rank: Rank) -> Any:
        drain, place = rank.offer(1, 1, is_due=False), rank.job.tier.place
        if place.members.rank == 0:
            rank.drainer.want(drain)
            asked.wait(SECONDS)
            newer = rank.offer(2, 2, is_due=False)
        else:
            newer = rank.offer(2, 2, is_due=False)
            rank.drainer.want(drain)
            asked.wait(SECONDS)
        return drain.result(SECONDS).entry.step, newer.result(SECONDS).entry.step

    asked = threading.Barrier(2)
    assert on_ranks(2, tmp_path, script) == [(2, 2)] * 2
    assert steps_in(tmp_path) == [2]


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 12))])
def test_any_order_of_saves_wishes_and_faults_ends_alike_on_all_ranks(tmp_path: Path, seed: int) -> None:
    """Three ranks at their own pace, and a store of which every tenth request fails, or is answered in vain."""
    plan = random.Random(seed)
    due = [plan.random() < 0.6 for _ in range(12)]
    asked = {number for number in range(12) if plan.random() < 0.2}
    faults, lock = random.Random(seed), threading.Lock()

    def fails(call: Call) -> None:
        with lock:
            is_hit = call.key.startswith(("checkpoints", "log")) and not calm.is_set() and faults.random() < 0.05
        if is_hit:
            raise StorageUnavailable(f"{call.verb} {call.key} fails {call.phase} it is done")

    def script(rank: Rank) -> Any:
        place = rank.job.tier.place
        pace = random.Random(100 * seed + place.members.rank)
        drains = []
        for number in range(12):
            time.sleep(pace.random() * 0.05)
            drains.append(rank.offer(number, number + 1, is_due=due[number]))
            if number in asked:
                time.sleep(pace.random() * 0.05)
                rank.drainer.want(drains[-1])
        assert rank.drainer.finish(SECONDS)
        meeting.wait(SECONDS)
        calm.set()
        return drains, place

    calm, meeting = threading.Event(), threading.Barrier(3)
    ends = on_ranks(3, tmp_path, script, hook=fails, close_seconds=SECONDS)
    outcomes = [[drain.result().entry.step for drain in drains] for drains, _ in ends]
    assert outcomes[0] == outcomes[1] == outcomes[2]
    assert all(step >= number for number, step in enumerate(outcomes[0]))
    assert outcomes[0][-1] == 11
    assert not any(place.in_use for _, place in ends)
    with open_store(tmp_path / "store", group="solo") as store:
        steps = [checkpoint.step for checkpoint in store]  # in the order of their records
        assert all(checkpoint.verify().ok for checkpoint in store)
    assert steps == sorted(set(outcomes[0]))


TIMEOUT_SECONDS = 3.0


def drain_and_die(path: Path, where: str) -> Any:
    """Rank 1 is killed at that call; what rank 0 hears of it, and after how many seconds."""
    rank = int(os.environ["RANK"])
    hook = KillAt(where, when="during") if rank == 1 else None
    more: dict[str, Any] = {"board": board_at(path), "timeout_seconds": TIMEOUT_SECONDS, "close_seconds": 0.1}
    with opened(path / "store", path / "disks", rank=rank, size=2, hook=hook, **more) as job:
        drain, began = job.offer(1, 1), time.monotonic()
        try:
            drain.result(SECONDS)
        except RankFailed as error:
            return error.ranks, str(error), time.monotonic() - began
    return None


def test_a_killed_rank_ends_the_drain_with_its_name_and_nothing_visible(tmp_path: Path) -> None:
    (ranks, text, seconds), _ = run_ranks(2, drain_and_die, tmp_path, "write*", expect_killed=[1])
    assert ranks == (1,)
    assert "Rank 1 gave no sign of life" in text
    assert seconds < 10 * TIMEOUT_SECONDS
    with open_store(tmp_path / "store", group="solo") as store:
        assert store.latest() is None
        assert [*store] == []


def _wait_until(is_there: Callable[[], bool]) -> None:
    until = time.monotonic() + SECONDS
    while not is_there():
        assert time.monotonic() < until
        time.sleep(0.01)
