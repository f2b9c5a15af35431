"""How ranks end a save: who deletes, who finds out what, in which order, and who meets again after a failure."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed.checkpoint as dcp
from outcomes import end_of
from thread_ranks import run_threads
from trees import make_tree

from ckptstore import Checkpoint, CheckpointStore, KeepLatest, open_store
from ckptstore.config import RetryConfig
from ckptstore.dcp import StoreWriter
from ckptstore.errors import InvalidInput, StorageError, StorageFull, StorageUnavailable
from ckptstore.saving import log_publisher
from ckptstore.storage import retry
from ckptstore.testing import Call, FailAt, with_faults

BIG = {"model.bin": os.urandom(2 << 20)}


@pytest.fixture(autouse=True)
def few_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTSTORE_RETRY_ATTEMPTS", "2")
    monkeypatch.setenv("CKPTSTORE_RETRY_WAIT_INITIAL_SECONDS", "0.01")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return make_tree(tmp_path / "source", BIG)


def saved_steps(ends: list[Any]) -> list[Any]:
    """The steps of what was saved; an error as it is, for errors have a step too."""
    return [end.step if isinstance(end, Checkpoint) else end for end in ends]


class CutOff:
    """A hook: once a call matches, and it has had its effect, no message of this rank comes or goes until `is_over`."""

    def __init__(self, matches: Callable[[Call], bool]) -> None:
        self._matches = matches
        self.has_begun = self.is_over = False

    def __call__(self, call: Call) -> None:
        if call.phase == "after" and self._matches(call):
            self.has_begun = True
        if self.has_begun and not self.is_over and call.key.startswith("group/"):
            raise StorageUnavailable("the network is gone")


def is_receipt(call: Call) -> bool:
    return call.verb == "create" and "/step-" in call.key and call.key.endswith(".00001")


def commits(root: Path) -> list[int]:
    with open_store(root) as store:
        assert all(checkpoint.verify().ok for checkpoint in store)
        return [checkpoint.step for checkpoint in store]


def test_a_rank_that_cannot_hear_the_leader_deletes_nothing(tmp_path: Path, source: Path) -> None:
    cut = CutOff(is_receipt)

    def flow(store: CheckpointStore, rank: int) -> Any:
        store = with_faults(store, cut) if rank == 1 else store
        ends = [end_of(lambda: store.save_directory(1, source))]
        cut.is_over |= rank == 1
        ends.append(end_of(lambda: store.save_directory(2, source)))
        return ends

    leader, cut_off = run_threads(2, tmp_path / "store", flow)
    assert cut.has_begun
    assert saved_steps(leader) == [1, 2]
    assert cut_off[0] == leader[0] or cut_off[0].committed is None
    assert cut_off[1] == leader[1]
    assert commits(tmp_path / "store") == [1, 2]


def test_a_rank_that_does_not_hear_of_the_commit_finds_it_in_the_log(tmp_path: Path, source: Path) -> None:
    def is_result(call: Call) -> bool:
        return call.verb == "read" and "/step-" in call.key and call.key.endswith(".result")

    cut = CutOff(is_result)

    def flow(store: CheckpointStore, rank: int) -> Any:
        store = with_faults(store, cut) if rank == 1 else store
        saved = end_of(lambda: store.save_directory(1, source))
        cut.is_over |= rank == 1
        return saved

    ends = run_threads(2, tmp_path / "store", flow)
    assert cut.has_begun
    assert saved_steps(ends) == [1, 1]


def test_a_leader_whose_result_cannot_be_posted_finds_its_commit(tmp_path: Path, source: Path) -> None:
    fault = FailAt(
        lambda call: call.verb == "create" and "/step-" in call.key and call.key.endswith(".result"), times=2
    )

    def flow(store: CheckpointStore, rank: int) -> Any:
        store = with_faults(store, fault) if rank == 0 else store
        return [end_of(lambda step=step: store.save_directory(step, source)) for step in (1, 2)]

    ends = run_threads(2, tmp_path / "store", flow)
    assert fault.struck == 2
    assert [saved_steps(rank) for rank in ends] == [[1, 2]] * 2
    assert commits(tmp_path / "store") == [1, 2]


@pytest.mark.parametrize("how", ["ranks", "dcp"])
def test_a_commit_of_which_the_storage_told_nothing_is_found(tmp_path: Path, source: Path, how: str) -> None:
    left = [0]

    def lose(call: Call) -> None:
        if call.key != "log/0000000002.json":
            return
        if call.verb == "create" and call.phase == "after":
            left[0] = 2  # and reading it back fails as often as it is tried
            raise StorageUnavailable("the reply is lost")
        if call.verb == "read" and left[0]:
            left[0] -= 1
            raise StorageUnavailable("still down")

    def flow(store: CheckpointStore, rank: int) -> Any:
        return end_of(lambda: with_faults(store, lose).save_directory(1, source))

    if how == "dcp":
        with open_store(tmp_path / "store") as store:
            target = with_faults(store, lose).dcp_target()
            target.finish(target.begin(1), [], offers=[{}])
            assert left == [0]
            assert [checkpoint.step for checkpoint in store] == [1]
        return
    ends = run_threads(2, tmp_path / "store", flow)
    assert left == [0]
    assert saved_steps(ends) == [1, 1]


def test_only_the_leader_deletes_what_a_failed_attempt_wrote(tmp_path: Path, source: Path) -> None:
    looked = [0, 0, 0]

    def flow(store: CheckpointStore, rank: int) -> Any:
        def watch(call: Call) -> None:
            if call.phase == "before" and call.verb in ("list", "delete") and call.key.startswith("checkpoints/"):
                looked[rank] += 1
                asked = retry._limited.get()(RetryConfig()).retry_deadline_seconds
                assert call.verb == "list" or asked < RetryConfig().retry_deadline_seconds, "others may be waiting"
            if call.verb == "create" and call.key.startswith("log/") and call.key.endswith("2.json"):
                raise StorageFull("no space")

        store = with_faults(store, watch)
        return end_of(lambda: store.save_directory(1, source))

    ends = run_threads(3, tmp_path / "store", flow)
    assert [(type(error), error.committed) for error in ends] == [(StorageFull, False)] * 3
    assert looked[0] > 0
    assert looked[1:] == [0, 0], "there may be nothing left by then"
    assert list((tmp_path / "store" / "checkpoints").rglob("*.bin")) == []


def test_an_error_after_the_commit_removes_nothing(tmp_path: Path, source: Path) -> None:
    with patch.object(log_publisher, "tell", side_effect=StorageError("no use")):
        ends = run_threads(2, tmp_path / "store", lambda store, rank: store.save_directory(1, source))
    assert [(type(error), error.committed) for error in ends] == [(StorageError, True)] * 2
    assert commits(tmp_path / "store") == [1]


@pytest.mark.parametrize("kind", ["directory", "state"])
def test_a_rank_that_missed_the_agreement_is_in_step_again(tmp_path: Path, source: Path, kind: str) -> None:
    fault = threading.Event()

    def lose(call: Call) -> None:
        if call.key.endswith("00000003.result") and call.phase == "before":
            fault.set()
            raise StorageUnavailable("lost")

    def flow(store: CheckpointStore, rank: int) -> Any:
        store = with_faults(store, lose) if rank == 1 else store
        save, what = (store.save, {}) if kind == "state" else (store.save_directory, source)
        return [end_of(lambda step=step: save(step, what)) for step in range(1, 7)]

    ends = run_threads(2, tmp_path / "store", flow, rank_timeout_seconds=2)
    assert fault.is_set()
    assert ends[1][0].committed is None
    assert saved_steps(ends[0][-2:]) == [5, 6]
    assert ends[0][-2:] == ends[1][-2:]


def slow_step_1(call: Call) -> None:
    if call.key.startswith("checkpoints/step-0000000001") and call.phase == "before":
        time.sleep(0.2)


NEXT: dict[str, Callable[[CheckpointStore], Any]] = {
    "directory": lambda store: store.save_directory(2, None),
    "state": lambda store: store.save(2, {"epoch": 2}),
    "dcp": lambda store: dcp.save({"epoch": 2}, storage_writer=StoreWriter(store.dcp_target(), step=2)),
    "resume": lambda store: store.resume(),
    "load": lambda store: store.load({"epoch": 0}),
    "close": lambda store: store.close(),
}


@pytest.mark.parametrize("how", NEXT)
def test_what_is_in_flight_ends_before_the_next_call_begins(tmp_path: Path, how: str) -> None:
    with with_faults(open_store(tmp_path / "store", retention=KeepLatest(1)), slow_step_1) as store:
        pending = store.save_async(1, {"epoch": 1})
        found = NEXT[how](store)
        assert pending.done()
        assert how not in ("resume", "load") or found.step == 1
    assert commits(tmp_path / "store") == ([2] if how in ("directory", "state", "dcp") else [1])


def test_what_torch_ends_too_late_is_refused(tmp_path: Path, source: Path) -> None:
    with open_store(tmp_path / "store") as store:
        target = store.dcp_target()
        prefix = target.begin(1)
        store.save_directory(2, source)
        with pytest.raises(InvalidInput, match="Step 2 was committed while step 1 was being saved"):
            target.finish(prefix, [], offers=[{}])
        prefix = target.begin(3)
        target.finish(prefix, [], offers=[{}])
        assert [checkpoint.step for checkpoint in store] == [2, 3]


def test_a_failure_that_one_rank_alone_has_is_raised_on_all(tmp_path: Path, source: Path) -> None:

    def flow(store: CheckpointStore, rank: int) -> Any:
        ends = [end_of(lambda: store.save_directory(1, source))]
        for failed in (0, 1):
            if rank == failed:  # as after a save whose end only this rank did not hear of
                store._background._unseen, store._background._failures = StorageError(f"of rank {rank}"), 1
            ends.append(end_of(lambda: store.save_directory(2, source)))
        return [*ends, end_of(lambda: store.save_directory(3, source))]

    for ends in run_threads(2, tmp_path / "store", flow, rank_timeout_seconds=600):
        assert saved_steps([ends[0], ends[3]]) == [1, 3]
        assert [(type(end), end.message) for end in ends[1:3]] == [
            (StorageError, "of rank 0"),
            (StorageError, "of rank 1"),
        ]


def test_a_closed_store_says_so(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    saved, target = store.save(1, {"epoch": 1}), store.dcp_target()
    store.close()
    calls: list[Callable[[], Any]] = [
        lambda: store.save(2, {"epoch": 2}),
        lambda: store.save(2, {"data": BIG["model.bin"]}),
        lambda: store.save_async(2, {"epoch": 2}),
        lambda: store.save_async(2, {"epoch": 2}, on_busy="skip"),
        lambda: store.save_directory(2, None),
        lambda: store.load({"epoch": 0}),
        lambda: store.resume({"epoch": 0}),
        lambda: store.warm_up({"epoch": 0}),
        lambda: store.best("loss"),
        lambda: store[1],
        lambda: list(store),
        lambda: store.pin(1),
        lambda: store.unpin(1),
        lambda: store.roll_back(1),
        lambda: target.begin(2),
        *(store.resume, store.latest, store.entries, store.trash, store.prune, store.collect_garbage, store.dcp_target),
    ]
    for call in calls:
        with pytest.raises(InvalidInput, match="is closed"):
            call()
    with pytest.raises(InvalidInput, match=r"was closed before this call.*open_store"):
        saved.verify()
    store.close()
    assert str(tmp_path) in repr(store)
    assert commits(tmp_path / "store") == [1]
