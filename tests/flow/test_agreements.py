"""How ranks end a save: who deletes, who finds out what, in which order, and who meets again after a failure."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from thread_ranks import run_threads
from trees import make_tree

from ckptstore import Checkpoint, CheckpointStore, KeepLatest, StorageGroup, open_store
from ckptstore.config import RetryConfig
from ckptstore.errors import CkptstoreError, InvalidInput, StorageError, StorageFull, StorageUnavailable
from ckptstore.saving import log_publisher
from ckptstore.storage import retry
from ckptstore.testing import Call, FailAt, run_ranks, with_faults

BIG = {"model.bin": os.urandom(2 << 20)}


@pytest.fixture(autouse=True)
def few_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTSTORE_RETRY_ATTEMPTS", "2")
    monkeypatch.setenv("CKPTSTORE_RETRY_WAIT_INITIAL_SECONDS", "0.01")


def end_of(call: Callable[[], Any]) -> Any:
    """What it returns, or the error that it raises."""
    try:
        return call()
    except CkptstoreError as error:
        return error


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


def test_a_rank_that_cannot_hear_the_leader_deletes_nothing(tmp_path: Path) -> None:
    cut, source = CutOff(is_receipt), make_tree(tmp_path / "source", BIG)

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


def test_a_rank_that_does_not_hear_of_the_commit_finds_it_in_the_log(tmp_path: Path) -> None:
    def is_result(call: Call) -> bool:
        return call.verb == "read" and "/step-" in call.key and call.key.endswith(".result")

    cut, source = CutOff(is_result), make_tree(tmp_path / "source", BIG)

    def flow(store: CheckpointStore, rank: int) -> Any:
        store = with_faults(store, cut) if rank == 1 else store
        saved = end_of(lambda: store.save_directory(1, source))
        cut.is_over |= rank == 1
        return saved

    ends = run_threads(2, tmp_path / "store", flow)
    assert cut.has_begun
    assert saved_steps(ends) == [1, 1]


def test_a_leader_whose_result_cannot_be_posted_finds_its_commit(tmp_path: Path) -> None:
    source = make_tree(tmp_path / "source", BIG)
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
def test_a_commit_of_which_the_storage_told_nothing_is_found(tmp_path: Path, how: str) -> None:
    source, left = make_tree(tmp_path / "source", BIG), [0]

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


def test_only_the_leader_deletes_what_a_failed_attempt_wrote(tmp_path: Path) -> None:
    source, deleted = make_tree(tmp_path / "source", BIG), [0, 0]

    def flow(store: CheckpointStore, rank: int) -> Any:
        def watch(call: Call) -> None:
            if call.phase == "before" and call.verb == "delete" and call.key.startswith("checkpoints/"):
                deleted[rank] += 1
                asked = retry._limited.get()(RetryConfig()).retry_deadline_seconds
                assert asked < RetryConfig().retry_deadline_seconds, "other ranks may be waiting for this one"
            if call.verb == "create" and call.key.startswith("log/") and call.key.endswith("2.json"):
                raise StorageFull("no space")

        store = with_faults(store, watch)
        return end_of(lambda: store.save_directory(1, source))

    ends = run_threads(3, tmp_path / "store", flow)
    assert [(type(error), error.committed) for error in ends] == [(StorageFull, False)] * 3
    assert deleted[0] > 0
    assert deleted[1] == 0
    assert list((tmp_path / "store" / "checkpoints").rglob("*.bin")) == []


def test_an_error_after_the_commit_removes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make_tree(tmp_path / "source", BIG)

    def fail(*_arguments: Any, **_options: Any) -> None:
        raise StorageError("no use")

    monkeypatch.setattr(log_publisher, "tell", fail)
    ends = run_threads(2, tmp_path / "store", lambda store, rank: store.save_directory(1, source))
    assert [(type(error), error.committed) for error in ends] == [(StorageError, True)] * 2
    assert commits(tmp_path / "store") == [1]


@pytest.mark.parametrize("kind", ["directory", "state"])
def test_a_rank_that_missed_the_agreement_is_in_step_again(tmp_path: Path, kind: str) -> None:
    source, fault = make_tree(tmp_path / "source", BIG), threading.Event()

    def lose(call: Call) -> None:
        if call.key.endswith("00000003.result") and call.phase == "before":
            fault.set()
            raise StorageUnavailable("lost")

    def flow(store: CheckpointStore, rank: int) -> Any:
        store = with_faults(store, lose) if rank == 1 else store
        save = (
            (lambda step: store.save_directory(step, source))
            if kind == "directory"
            else (lambda step: store.save(step, {"epoch": step}))
        )
        return [end_of(lambda step=step: save(step)) for step in range(1, 7)]

    ends = run_threads(2, tmp_path / "store", flow, rank_timeout_seconds=2)
    assert fault.is_set()
    assert ends[1][0].committed is None
    assert saved_steps(ends[0][-2:]) == [5, 6]
    assert ends[0][-2:] == ends[1][-2:]


def stopped_leader(directory: str) -> list[str]:
    """Rank 0 stops itself before its second save; rank 1 goes on, gives up twice, and lets it run again."""
    rank, root = int(os.environ["RANK"]), Path(directory)
    group = StorageGroup(rank, 2, "start")
    ends: list[str] = []
    source = make_tree(root / f"source-{rank}", {"model.bin": b"x" * 1000})
    with open_store(root / "store", group=group, rank_timeout_seconds=1.5) as store:
        for step in range(1, 30):
            if rank == 0 and step == 2:
                (root / "pid").write_text(str(os.getpid()))
                os.kill(os.getpid(), signal.SIGSTOP)
            end = end_of(lambda step=step: store.save_directory(step, source))
            ends.append(str(end) if isinstance(end, CkptstoreError) else "saved")
            if rank == 1 and step == 3:
                os.kill(int((root / "pid").read_text()), signal.SIGCONT)
            if step > 3 and ends[-2:] == ["saved", "saved"]:
                return ends
    return ends


def test_a_leader_that_was_stopped_catches_up_with_the_others(tmp_path: Path) -> None:
    leader, other = run_ranks(2, stopped_leader, str(tmp_path))
    assert leader[0] == other[0] == "saved"
    assert leader[-2:] == other[-2:] == ["saved", "saved"]
    assert len(leader) == len(other) > 4
    assert "has given up" in leader[1]
    assert "Rank 0 gave no sign of life" in other[1]


def slow_step_1(call: Call) -> None:
    if call.key.startswith("checkpoints/step-0000000001") and call.phase == "before":
        time.sleep(0.2)


@pytest.mark.parametrize("how", ["directory", "dcp", "state", "resume", "load", "close"])
def test_what_is_in_flight_ends_before_the_next_call_begins(tmp_path: Path, how: str) -> None:
    source = make_tree(tmp_path / "source", BIG)
    store = with_faults(open_store(tmp_path / "store", retention=KeepLatest(1)), slow_step_1)
    pending = store.save_async(1, {"epoch": 1})
    if how == "directory":
        store.save_directory(2, source)
    elif how == "state":
        store.save(2, {"epoch": 2})
    elif how == "dcp":
        import torch.distributed.checkpoint as dcp

        from ckptstore.dcp import StoreWriter

        dcp.save({"epoch": 2}, storage_writer=StoreWriter(store.dcp_target(), step=2))
    elif how == "resume":
        assert store.resume().step == 1
    elif how == "load":
        assert store.load({"epoch": 0}) is not None
    else:
        store.close()
    assert pending.done()
    store.close()
    assert commits(tmp_path / "store") == ([2] if how in ("directory", "state", "dcp") else [1])


def test_what_torch_ends_too_late_is_refused(tmp_path: Path) -> None:
    source = make_tree(tmp_path / "source", BIG)
    with open_store(tmp_path / "store") as store:
        target = store.dcp_target()
        prefix = target.begin(1)
        store.save_directory(2, source)
        with pytest.raises(InvalidInput, match="Step 2 was committed while step 1 was being saved"):
            target.finish(prefix, [], offers=[{}])
        prefix = target.begin(3)
        target.finish(prefix, [], offers=[{}])
        assert [checkpoint.step for checkpoint in store] == [2, 3]


def test_a_failure_that_one_rank_alone_has_is_raised_on_all(tmp_path: Path) -> None:
    source = make_tree(tmp_path / "source", BIG)

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
    source = make_tree(tmp_path / "source", BIG)
    store = open_store(tmp_path / "store")
    store.save(1, {"epoch": 1})
    target = store.dcp_target()
    store.close()
    calls: list[Callable[[], Any]] = [
        lambda: store.save(2, {"epoch": 2}),
        lambda: store.save(2, {"data": BIG["model.bin"]}),
        lambda: store.save_async(2, {"epoch": 2}),
        lambda: store.save_async(2, {"epoch": 2}, on_busy="skip"),
        lambda: store.save_directory(2, source),
        lambda: store.load({"epoch": 0}),
        lambda: store.resume(),
        lambda: store.resume({"epoch": 0}),
        lambda: store.warm_up({"epoch": 0}),
        lambda: store.latest(),
        lambda: store.best("loss"),
        lambda: store[1],
        lambda: list(store),
        lambda: store.entries(),
        lambda: store.trash(),
        lambda: store.pin(1),
        lambda: store.unpin(1),
        lambda: store.roll_back(1),
        lambda: store.prune(),
        lambda: store.collect_garbage(),
        lambda: store.dcp_target(),
        lambda: target.begin(2),
    ]
    for call in calls:
        with pytest.raises(InvalidInput, match="is closed"):
            call()
    store.close()
    assert str(tmp_path) in repr(store)
    assert commits(tmp_path / "store") == [1]
