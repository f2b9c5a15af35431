"""The rules of a store in flows: retention and trash, pins, roll-back, fencing, resuming, full disks."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from small_disks import mounted
from thread_ranks import run_threads
from trees import directories, heard, make_tree, save_tree, settle, steps

from ckptstore import (
    Checkpoint,
    CheckpointGone,
    CheckpointStore,
    InvalidInput,
    KeepBest,
    KeepLatest,
    NoUsableCheckpoint,
    StorageFull,
    StoreFenced,
    open_store,
)
from ckptstore.events import CheckpointSkipped, CheckpointsPruned, ResumeForgotten


def save(store: CheckpointStore, *wanted: int, loss: float = 1.0) -> Checkpoint:
    return [store.save_directory(step, None, metrics={"loss": loss}) for step in wanted][-1]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


def test_retention_drops_in_the_commit_and_prune_deletes_after_the_grace(root: Path) -> None:
    policy = KeepLatest(1) | KeepBest(1, "loss")
    with open_store(root, retention=policy, grace_seconds=3600) as store:
        for step, loss in [(1, 0.1), (2, 0.5), (3, 0.4)]:
            save(store, step, loss=loss)
        assert steps(store) == [1, 3]
        settle(store)
        assert [(item.step, item.goes) for item in store.trash()] == [(2, False)]
        assert [past.removed_because for past in store.history()] == ["", "no rule keeps it", ""]
        assert store.prune() == []
    with open_store(root, grace_seconds=0) as store, heard(CheckpointsPruned) as pruned:
        planned = store.prune(dry_run=True)
        assert [item.step for item in planned] == [2]
        assert len(directories(root)) == 3
        assert [item.number for item in store.prune()] == [item.number for item in planned]
        assert len(directories(root)) == 2
        assert store.trash() == []
    assert [event.steps for event in pruned] == [(2,)]


def test_pins_protect_until_they_are_gone(root: Path) -> None:
    with open_store(root, retention=KeepLatest(1)) as store, open_store(root) as command_line:
        save(store, 1)
        command_line.pin(1)  # which fences nobody
        save(store, 2, 3)
        assert steps(store) == [1, 3]
        assert [entry.is_pinned for entry in store.entries()] == [True, False]
        store.unpin(1)
        save(store, 4)
        assert steps(store) == [4]
        with pytest.raises(CheckpointGone, match="live ones: 4"):
            store.pin(1)


def test_roll_back_makes_an_earlier_one_the_latest(root: Path) -> None:
    with open_store(root) as store:
        save(store, 10, 20, 30)
        assert store.roll_back(10).step == 10
        assert steps(store) == [10]
        assert save(store, 15) == store.latest()
        store.pin(15)
        with pytest.raises(InvalidInput, match="pinned"):
            store.roll_back(10)


def test_the_resume_source_stays(root: Path) -> None:
    with open_store(root, retention=KeepLatest(1)) as store:
        save(store, 1)
    with open_store(root, retention=KeepLatest(1), grace_seconds=0) as store:
        assert store.resume().step == 1
        for step in (2, 3):
            save(store, step)
            settle(store)
        assert steps(store) == [1, 3]
        assert [entry.is_resume_source for entry in store.entries()] == [True, False]


def test_an_older_job_is_fenced_and_changes_nothing(root: Path) -> None:
    with open_store(root, retention=KeepLatest(2)) as old:
        save(old, 1, 2, 3)  # step 1 goes to the trash
        with open_store(root) as new:
            assert new.resume() == old.latest()
            before = sorted(path.name for path in (root / "log").iterdir()), directories(root)
            for action in (
                lambda: save(old, 4),
                lambda: old.pin(2),
                lambda: old.unpin(2),
                lambda: old.roll_back(2),
                lambda: old.restore(1),
                old.resume,
            ):
                with pytest.raises(StoreFenced) as caught:
                    action()
                assert caught.value.committed is False
            assert (sorted(path.name for path in (root / "log").iterdir()), directories(root)) == before
            save(new, 4)
            assert steps(old) == [2, 3, 4]


def test_a_fenced_job_prunes_nothing(root: Path) -> None:
    with open_store(root, retention=KeepLatest(1)) as old:
        save(old, 1, 2)
        with open_store(root) as new:
            new.resume()
            old._job.config = old._job.config.__class__(grace_seconds=0.0)
            assert [item.step for item in old.prune(dry_run=True)] == [1]
            with pytest.raises(StoreFenced):
                old.prune()
            assert len(directories(root)) == 2


def test_a_job_that_forgot_to_resume_hears_of_the_later_checkpoint_once(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def forgotten(*steps: int, resume: bool = False) -> list[tuple[int, int]]:
        with heard(ResumeForgotten) as events, open_store(root) as store:
            if resume:
                store.resume()
            save(store, *steps)
        return [(event.step, event.latest_step) for event in events]

    assert forgotten(1, 5) == []  # the store was empty
    assert forgotten(6, 7) == []  # later than what is there
    assert forgotten(2, 3, 4) == [(2, 7)]
    assert "step 2 is the first save of this job, and step 7 is there" in caplog.text
    assert forgotten(3, resume=True) == []
    assert forgotten(3) == [(3, 3)]


def test_a_resume_passes_over_what_is_not_whole_and_says_why(root: Path, tmp_path: Path) -> None:
    with open_store(root) as store:
        paths = [Path(save_tree(store, tmp_path, step).uri) for step in range(5)]
        (paths[1] / "f").unlink()
        (paths[2] / "ckptstore.json").unlink()
        (paths[3] / "ckptstore.json").chmod(0o644)
        (paths[3] / "ckptstore.json").write_text("{")
        shutil.rmtree(paths[4])
        with pytest.raises(CheckpointGone):
            store[4].verify()
        with heard(CheckpointSkipped) as skipped:
            assert store.resume().step == 0
        assert [event.step for event in skipped] == [4, 3, 2, 1]
        assert "f is missing" in skipped[-1].reason
        shutil.rmtree(paths[0])
        with pytest.raises(NoUsableCheckpoint, match="None of 5"):
            store.resume()


def test_a_full_disk_is_told_before_anything_is_written(tmp_path: Path) -> None:
    with mounted(tmp_path / "small", "3m") as mount:
        full_disk(tmp_path, mount / "store")


def full_disk(tmp_path: Path, root: Path) -> None:
    def sized(store: CheckpointStore, step: int, size: int, rank: int = 0) -> None:
        store.save_directory(step, make_tree(tmp_path / f"{step}-{size}-{rank}", {"f": b"1" * size}))

    def flow(store: CheckpointStore, rank: int) -> Any:
        sized(store, 1, 500_000, rank)
        with pytest.raises(StorageFull, match=r"4000000 bytes.* free") as full:
            sized(store, 2, 2_000_000, rank)
        return full.value.committed

    assert run_threads(2, root, flow) == [False] * 2
    with open_store(root, retention=KeepLatest(1)) as store:
        assert steps(store) == [1]
        assert store[1].verify().ok
        # what is in the trash is given up when the disk would overflow, however long its grace period still is
        sized(store, 2, 1_500_000)
        assert steps(store) == [1, 2]
        sized(store, 3, 100)
        assert steps(store) == [1, 3]
        assert [item.step for item in store.trash()] == [2]
        sized(store, 4, 1_500_000)
        assert [item.step for item in store.trash()] == [3]
