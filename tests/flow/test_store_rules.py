"""The rules of a store in flows: retention and trash, pins, roll-back, fencing, resuming, garbage, copies."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path
from uuid import uuid4

import pytest
from small_disks import mounted
from thread_ranks import run_threads
from trees import directories, make_tree, read_tree, settle, steps

from ckptstore import (
    Checkpoint,
    CheckpointGone,
    CheckpointStore,
    InvalidInput,
    KeepBest,
    KeepLatest,
    NoUsableCheckpoint,
    RankTimeout,
    StoreFenced,
    StoreMissing,
    open_store,
)
from ckptstore.config import RetryConfig
from ckptstore.events import CheckpointSkipped, CheckpointsPruned, Event, ResumeForgotten, listening
from ckptstore.format.order import SaveOrder, Void
from ckptstore.interchange.copying import copy_checkpoint, copy_store
from ckptstore.log import Log
from ckptstore.storage.disk.local import LocalStorage
from ckptstore.transfer.opened import open_place


def save(store: CheckpointStore, tmp_path: Path, step: int, loss: float = 1.0, data: bytes = b"x") -> Checkpoint:
    return store.save_directory(step, make_tree(tmp_path / uuid4().hex, {"f": data}), metrics={"loss": loss})


def test_retention_drops_in_the_commit_and_prune_deletes_after_the_grace(tmp_path: Path) -> None:
    root = tmp_path / "store"
    policy = KeepLatest(1) | KeepBest(1, "loss")
    with open_store(root, retention=policy, grace_seconds=3600) as store:
        for step, loss in [(1, 0.1), (2, 0.5), (3, 0.4)]:
            save(store, tmp_path, step, loss)
        assert steps(store) == [1, 3]
        settle(store)
        assert [(item.step, item.goes) for item in store.trash()] == [(2, False)]
        newest = store._job.log.newest()
        assert newest is not None
        assert list(newest.change.reasons.values()) == ["no rule keeps it"]  # type: ignore[union-attr]
        assert len(directories(root)) == 3
        assert store.prune() == []
    events: list[Event] = []
    with open_store(root, grace_seconds=0) as store, listening(events.append):
        planned = store.prune(dry_run=True)
        assert [item.step for item in planned] == [2]
        assert len(directories(root)) == 3
        assert [item.number for item in store.prune()] == [item.number for item in planned]
        assert len(directories(root)) == 2
        assert store.trash() == []
    pruned = [event for event in events if isinstance(event, CheckpointsPruned)]
    assert [event.steps for event in pruned] == [(2,)]


def test_a_save_prunes_in_the_background(tmp_path: Path) -> None:
    with open_store(tmp_path / "store", retention=KeepLatest(1), grace_seconds=0) as store:
        for step in range(4):
            save(store, tmp_path, step)
            settle(store)
        assert len(directories(tmp_path / "store")) == 1
        assert steps(store) == [3]


def test_pins_protect_until_they_are_gone(tmp_path: Path) -> None:
    with open_store(tmp_path / "store", retention=KeepLatest(1)) as store:
        save(store, tmp_path, 1)
        store.pin(1)
        save(store, tmp_path, 2)
        save(store, tmp_path, 3)
        assert steps(store) == [1, 3]
        assert [entry.is_pinned for entry in store.entries()] == [True, False]
        store.unpin(1)
        save(store, tmp_path, 4)
        assert steps(store) == [4]
        with pytest.raises(CheckpointGone, match="live ones: 4"):
            store.pin(1)


def test_roll_back_makes_an_earlier_one_the_latest(tmp_path: Path) -> None:
    with open_store(tmp_path / "store") as store:
        for step in (10, 20, 30):
            save(store, tmp_path, step)
        assert store.roll_back(10).step == 10
        assert steps(store) == [10]
        assert save(store, tmp_path, 15) == store.latest()
        store.pin(15)
        with pytest.raises(InvalidInput, match="pinned"):
            store.roll_back(10)


def test_saves_are_counted_and_a_roll_back_leaves_those_behind_that_are_newer(tmp_path: Path) -> None:
    with open_store(tmp_path / "store") as store:
        for step in (10, 20, 30):
            save(store, tmp_path, step)
        store.roll_back(20)
        save(store, tmp_path, 40)
    with open_store(tmp_path / "store") as person:
        person.roll_back(20)
    log = Log(LocalStorage(tmp_path / "store"), retry=RetryConfig())
    newest = log.newest()
    assert newest is not None
    commits = [record.entry for record in log.records([2, 3, 4, 6])]
    assert [entry.order for entry in commits] == [(1, 1), (1, 2), (1, 3), (1, 4)]
    within = log.records([5])[0].state.void
    assert within == (Void(SaveOrder(1, 2), SaveOrder(1, 4)),)  # the job goes on, and what it saves then is good
    assert newest.state.void == (Void(SaveOrder(1, 2), SaveOrder(2, 0)),)
    assert log.verify_chain() == []


def test_the_resume_source_stays(tmp_path: Path) -> None:
    with open_store(tmp_path / "store", retention=KeepLatest(1)) as store:
        save(store, tmp_path, 1)
    with open_store(tmp_path / "store", retention=KeepLatest(1), grace_seconds=0) as store:
        resumed = store.resume()
        assert resumed is not None
        assert resumed.step == 1
        for step in (2, 3):
            save(store, tmp_path, step)
            settle(store)
        assert steps(store) == [1, 3]
        assert [entry.is_resume_source for entry in store.entries()] == [True, False]


def test_an_older_job_is_fenced_and_changes_nothing(tmp_path: Path) -> None:
    root = tmp_path / "store"
    with open_store(root, grace_seconds=0) as old:
        save(old, tmp_path, 1)
        save(old, tmp_path, 2)
        with open_store(root) as new:
            assert new.resume() == old.latest()
            before = sorted(path.name for path in (root / "log").iterdir())
            for action in (
                lambda: save(old, tmp_path, 3),
                lambda: old.pin(1),
                lambda: old.unpin(1),
                lambda: old.roll_back(1),
                lambda: old.resume(),
            ):
                with pytest.raises(StoreFenced) as caught:
                    action()
                assert caught.value.committed is False
            assert sorted(path.name for path in (root / "log").iterdir()) == before
            assert len(directories(root)) == 2
            save(new, tmp_path, 3)
            assert steps(old) == [1, 2, 3]


def test_a_fenced_job_prunes_nothing(tmp_path: Path) -> None:
    root = tmp_path / "store"
    with open_store(root, retention=KeepLatest(1)) as old:
        save(old, tmp_path, 1)
        save(old, tmp_path, 2)
        with open_store(root) as new:
            new.resume()
            old._job.config = old._job.config.__class__(grace_seconds=0.0)
            assert [item.step for item in old.prune(dry_run=True)] == [1]
            with pytest.raises(StoreFenced):
                old.prune()
            assert len(directories(root)) == 2


def test_a_command_line_fences_nobody(tmp_path: Path) -> None:
    with open_store(tmp_path / "store") as job, open_store(tmp_path / "store") as command_line:
        save(job, tmp_path, 1)
        command_line.pin(1)
        save(job, tmp_path, 2)
        assert [entry.is_pinned for entry in job.entries()] == [True, False]


def test_a_job_that_forgot_to_resume_hears_of_the_later_checkpoint_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def forgotten(*steps: int, resume: bool = False) -> list[tuple[int, int]]:
        events: list[Event] = []
        with listening(events.append), open_store(tmp_path / "store") as store:
            if resume:
                store.resume()
            for step in steps:
                save(store, tmp_path, step)
        return [(event.step, event.latest_step) for event in events if isinstance(event, ResumeForgotten)]

    assert forgotten(1, 5) == []  # the store was empty
    assert forgotten(6, 7) == []  # later than what is there
    assert forgotten(2, 3, 4) == [(2, 7)]
    assert "step 2 is the first save of this job, and step 7 is there" in caplog.text
    assert forgotten(3, resume=True) == []
    assert forgotten(3) == [(3, 3)]


def test_a_resume_passes_over_what_is_not_whole_and_says_why(tmp_path: Path) -> None:
    with open_store(tmp_path / "store") as store:
        for step in (1, 2, 3, 4):
            save(store, tmp_path, step)
        broken = [Path(store[step].uri) for step in (2, 3, 4)]
        (broken[0] / "f").unlink()
        (broken[1] / "ckptstore.json").unlink()
        (broken[2] / "ckptstore.json").chmod(0o644)
        (broken[2] / "ckptstore.json").write_text("{")
        events: list[Event] = []
        with listening(events.append):
            resumed = store.resume()
        assert resumed is not None
        assert resumed.step == 1
        skipped = [event for event in events if isinstance(event, CheckpointSkipped)]
        assert [event.step for event in skipped] == [4, 3, 2]
        assert "f is missing" in skipped[-1].reason
        shutil.rmtree(resumed.uri)
        with pytest.raises(NoUsableCheckpoint, match="None of 4"):
            store.resume()


def test_a_crash_with_four_ranks_and_a_restart_with_two_mix_nothing(tmp_path: Path) -> None:
    root = tmp_path / "store"
    given_up = threading.Event()

    def gone(*_: object, **__: object) -> list[object]:
        assert given_up.wait(120)
        return []

    def crash(store: CheckpointStore, rank: int) -> None:
        directory = make_tree(tmp_path / f"four{rank}", {"model.pt": b"four-%d" % rank})
        if rank == 3:  # this rank answers the first exchange and then is gone
            store._job.transfer.upload = gone  # type: ignore[assignment]
        try:
            store.save_directory(8, directory)
        finally:
            given_up.set()

    results = run_threads(4, root, crash, rank_timeout_seconds=3)
    assert all(isinstance(error, RankTimeout) for error in results[:3])
    assert results[0].ranks == (3,)

    def restart(store: CheckpointStore, rank: int) -> object:
        resumed = store.resume()
        directory = make_tree(tmp_path / f"two{rank}", {"model.pt": b"two-%d" % rank})
        return resumed, store.save_directory(8, directory)

    results = run_threads(2, root, restart)
    assert [resumed for resumed, _ in results] == [None, None]
    with results[0][1].as_directory() as path:
        assert read_tree(path) == {"model-rank=00000.pt": b"two-0", "model-rank=00001.pt": b"two-1"}


def leave_an_attempt(root: Path, name: str) -> Path:
    return make_tree(root / "checkpoints" / name, {"model.pt": b"torn"})


def test_garbage_is_what_a_superseded_job_left(tmp_path: Path) -> None:
    root = tmp_path / "store"
    with open_store(root) as store:
        save(store, tmp_path, 1)
        older = leave_an_attempt(root, "step-0000000005-e0000-0123abcd")
        own = leave_an_attempt(root, "step-0000000005-e0001-0123abcd")
        foreign = leave_an_attempt(root, "what-is-this")
        planned = store.collect_garbage(dry_run=True)
        assert list(planned.attempts) == [older.name]
        assert older.exists()
        found = store.collect_garbage()
        assert (found.attempts, found.left) == (planned.attempts, planned.left)
        assert set(found.left) == {f"checkpoints/{own.name}", f"checkpoints/{foreign.name}"}
        assert not older.exists()
        assert own.exists()
        assert foreign.exists()
    with open_store(root) as other:
        assert list(other.collect_garbage(claim=True).attempts) == [own.name]
        assert foreign.exists()
        assert steps(other) == [1]
        assert other[1].verify().ok


def test_garbage_of_another_store_is_left(tmp_path: Path) -> None:
    with open_store(tmp_path / "a") as one, open_store(tmp_path / "b") as two:
        save(one, tmp_path, 1)
        save(two, tmp_path, 1)
        foreign = Path(one[1].uri)
        target = tmp_path / "b" / "checkpoints" / foreign.name
        if not target.exists():
            shutil.copytree(foreign, target)
        found = two.collect_garbage(claim=True)
        assert "belongs to the store" in found.left[f"checkpoints/{foreign.name}"]
        assert target.exists()


def test_actions_on_no_store(tmp_path: Path) -> None:
    with open_store(tmp_path / "absent") as store:
        with pytest.raises(StoreMissing):
            store.collect_garbage()
        with pytest.raises(StoreMissing):
            store.pin(1)
        assert store.prune() == []
    assert not (tmp_path / "absent").exists()


def test_a_reader_of_the_real_path_is_waited_for(tmp_path: Path) -> None:
    with open_store(tmp_path / "store", retention=KeepLatest(1), grace_seconds=0) as store:
        first = save(store, tmp_path, 1)
        with first.as_directory() as path:
            save(store, tmp_path, 2)
            settle(store)
            assert read_tree(path) == {"f": b"x"}
            (item,) = store.trash()
            assert item.held_by == "1 readers hold a lease"
            assert store.prune() == []
        assert [item.step for item in store.prune()] == [1]
        with pytest.raises(CheckpointGone), first.as_directory():
            pass


def test_a_full_disk_is_told_before_anything_is_written(tmp_path: Path) -> None:
    with mounted(tmp_path / "small", "3m") as mount:
        full_disk(tmp_path, mount / "store")


def full_disk(tmp_path: Path, root: Path) -> None:
    from ckptstore import StorageFull

    def flow(store: CheckpointStore, rank: int) -> object:
        store.save_directory(1, make_tree(tmp_path / f"small{rank}", {"f": b"1" * 500_000}))
        try:
            store.save_directory(2, make_tree(tmp_path / f"large{rank}", {"f": b"1" * 2_000_000}))
        except StorageFull as error:
            return error
        return None

    for error in run_threads(2, root, flow):
        assert error.committed is False
        assert "4000000 bytes" in str(error)
        assert "free" in str(error)
    with open_store(root, retention=KeepLatest(1)) as store:
        assert steps(store) == [1]
        assert store[1].verify().ok
        # what is in the trash is given up when the disk would overflow, however long its grace period still is
        save(store, tmp_path, 2, data=b"2" * 1_500_000)
        assert steps(store) == [1, 2]
        save(store, tmp_path, 3, data=b"3" * 100)
        assert steps(store) == [1, 3]
        assert [item.step for item in store.trash()] == [2]
        save(store, tmp_path, 4, data=b"4" * 1_500_000)
        assert [item.step for item in store.trash()] == [3]


def copy(store: CheckpointStore, uri: str) -> object:
    target = open_place(uri)
    try:
        return copy_store(store, target)
    finally:
        target.close()


def test_a_store_is_copied_with_a_log_of_its_own_and_goes_on(tmp_path: Path) -> None:
    with open_store(tmp_path / "a") as store:
        for step in (1, 2, 3):
            save(store, tmp_path, step, loss=step / 10, data=b"%d" % step * 1000)
        store.pin(2)
        store[3].set_metadata({"note": "set later"})
        report = copy(store, str(tmp_path / "b"))
        assert report.steps == (1, 2, 3)  # type: ignore[attr-defined]
        victim = Path(open_store(tmp_path / "b")[2].uri)
        save(store, tmp_path, 4)
        shutil.rmtree(victim)  # an interrupted copy looks like this, had its record not been written
        again = copy(store, str(tmp_path / "b"))
        assert (again.steps, again.present) == ((4,), (1, 2, 3))  # type: ignore[attr-defined]
    with open_store(tmp_path / "b") as other:
        assert steps(other) == [1, 2, 3, 4]
        assert [entry.is_pinned for entry in other.entries()] == [False, True, False, False]
        assert other[3].metadata == {"note": "set later"}
        assert other[3].verify().ok
        assert not Path(other[2].uri).exists()
        resumed = other.resume()
        assert resumed is not None
        assert resumed.step == 4
        save(other, tmp_path, 5)
        assert other.latest().step == 5


def test_an_interrupted_copy_goes_on_where_it_broke_off(tmp_path: Path) -> None:
    with open_store(tmp_path / "a") as store:
        files = {f"f{index}": os.urandom(1000) for index in range(10)}
        store.save_directory(1, make_tree(tmp_path / "s", files))
        source = store[1]
        target = open_place(str(tmp_path / "copy"))
        copied = make_tree(tmp_path / "copy", {name: files[name] for name in ("f0", "f1", "f2")})
        (copied / "f2").write_bytes(b"z" * 1000)
        report = copy_checkpoint(source, target)
        assert (report.num_copied, report.num_found) == (8, 2)
        target.close()
    assert read_tree(tmp_path / "copy") == files
    assert Checkpoint.from_directory(tmp_path / "copy").verify().ok


@pytest.mark.parametrize("kept_bytes", [0, 100])
def test_a_copy_that_was_killed_while_it_wrote_the_manifest_goes_on(tmp_path: Path, kept_bytes: int) -> None:
    with open_store(tmp_path / "a") as store:
        save(store, tmp_path, 1)
        target = open_place(str(tmp_path / "copy"))
        copy_checkpoint(store[1], target)
        manifest = tmp_path / "copy" / "ckptstore.json"
        torn = manifest.read_bytes()[:kept_bytes]
        manifest.unlink()
        manifest.write_bytes(torn)
        copy_checkpoint(store[1], target)
        assert Checkpoint.from_directory(tmp_path / "copy").verify().ok
        manifest.unlink()
        manifest.write_bytes(torn + b"x")
        with pytest.raises(InvalidInput, match="Another checkpoint"):
            copy_checkpoint(store[1], target)
        target.close()


def test_a_copy_refuses_a_place_that_is_taken(tmp_path: Path) -> None:
    with open_store(tmp_path / "a") as store, open_store(tmp_path / "b") as other:
        save(store, tmp_path, 1)
        save(other, tmp_path, 1)
        with pytest.raises(InvalidInput, match="Another store"):
            copy(store, str(tmp_path / "b"))
        make_tree(tmp_path / "c", {"mine": b"1"})
        target = open_place(str(tmp_path / "c"))
        with pytest.raises(InvalidInput, match="mine"):
            copy_checkpoint(store[1], target)
        target.close()


def test_a_store_copied_by_other_tools_without_its_files_is_not_trusted(tmp_path: Path) -> None:
    with open_store(tmp_path / "a") as store:
        save(store, tmp_path, 1)
        save(store, tmp_path, 2)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    shutil.rmtree(next((tmp_path / "b" / "checkpoints").glob("step-0000000002-*")))
    with open_store(tmp_path / "b") as copied:
        with pytest.raises(CheckpointGone):
            copied[2].verify()
        resumed = copied.resume()
        assert resumed is not None
        assert resumed.step == 1
