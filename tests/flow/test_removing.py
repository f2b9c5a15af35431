"""What is in the trash, by hand or by a rule, never what somebody needs unless it is forced, and how it comes back."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from trees import Once, directories, save_tree, settle, steps

from ckptstore import (
    CheckpointDamaged,
    CheckpointGone,
    CheckpointStore,
    InvalidInput,
    KeepAll,
    KeepLatest,
    KeepWeights,
    KeepWithin,
    open_store,
)
from ckptstore.format.changes import RESUMED_FROM
from ckptstore.log.identity import KEPT_BY_RAY, read_or_create_store_json
from ckptstore.storage.open import open_storage
from ckptstore.testing import Call, with_faults
from ckptstore.upkeep import leases

FROZEN = {f"w{index}": torch.full((1 << 19,), float(index)) for index in range(4)}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[CheckpointStore]:
    """Steps 1 and 2 of a first job; 3, 4 and 5 of one that resumed from 2, of which 3 is pinned."""
    for first in (1, 3):
        with open_store(tmp_path / "store") as job:
            job.resume()
            for step in (1, 2) if first == 1 else (3, 4, 5):
                job.save_directory(step, None)
    job = open_store(tmp_path / "store")
    job.pin(3)
    job.close()
    with open_store(tmp_path / "store", grace_seconds=0) as person:
        yield person


def test_what_nobody_needs_goes_to_the_trash_and_comes_back(store: CheckpointStore) -> None:
    store.remove(4)
    assert (steps(store), [item.step for item in store.trash()]) == ([1, 2, 3, 5], [4])
    assert store.restore(4, pin=False).verify().ok
    store.remove(4)
    store.remove(1)
    assert [item.step for item in store.prune()] == [1, 4]
    with pytest.raises(CheckpointGone, match=r"no live checkpoint of step 4; live ones: 2, 3, 5"):
        store.remove(4)


@pytest.mark.parametrize(
    ("step", "why", "left"),
    [(5, "the latest", [1, 2, 3, 4]), (3, "pinned", [1, 2, 4, 5]), (2, "resumed from it", [1, 3, 4, 5])],
)
def test_what_somebody_needs_goes_by_force_alone(store: CheckpointStore, step: int, why: str, left: list[int]) -> None:
    with pytest.raises(InvalidInput, match=f"Step {step} was not removed: .*{why}.*With force"):
        store.remove(step)
    assert steps(store) == [1, 2, 3, 4, 5]
    store.remove(step, force=True)
    assert steps(store) == left
    assert [item.step for item in store.prune()] == ([] if step == 2 else [step]), "the job may still need what it read"
    assert store.verify_log() == []


def test_a_pin_goes_with_its_checkpoint_or_stays(tmp_path: Path) -> None:
    state = {"model": torch.ones(400), "optimizer": {"m": torch.ones(9000)}}
    with open_store(tmp_path, retention=KeepAll() | KeepWeights(KeepAll())) as store:
        for step in (1, 2, 3):
            store.save(step, state)
        store.thin(1, "optimizer.*")
        for step in (2, 3):
            store.pin(step)
        first = store._job.log.newest()
        store.remove(3, force=True)
        newest = store._job.log.newest()
        assert newest.number == first.number + 1, "one record, not two"
        assert (steps(store), len(newest.state.pinned)) == ([1, 2], 1)
        with pytest.raises(InvalidInput, match="Step 2 was not removed: step 1 before it was thinned"):
            store.remove(2, force=True)
        assert [(entry.checkpoint.step, entry.is_pinned) for entry in store.entries()] == [(1, False), (2, True)]
        store.remove_all(force=True)
        assert (steps(store), store.verify_log()) == ([], [])


def test_a_prune_that_deletes_nothing_writes_nothing(tmp_path: Path) -> None:
    writes: list[str] = []

    def hook(call: Call) -> None:
        is_prune = threading.current_thread().name.endswith("prune")
        if is_prune and call.verb in ("write", "create", "overwrite", "delete"):
            writes.append(f"{call.verb} {call.key}")

    with with_faults(open_store(tmp_path / "store", retention=KeepLatest(1)), hook) as store:
        for step in (1, 2):
            save_tree(store, tmp_path, step)
            settle(store)
        assert [item.step for item in store.trash()] == [1]
        assert set(writes) <= {"delete "}, "a directory that its owner removes after the save stays removed"


def test_a_budget_counts_the_files_that_checkpoints_share_once(tmp_path: Path) -> None:
    with open_store(tmp_path / "store", retention=KeepWithin("10MB")) as store:
        for step in (1, 2, 3):
            store.save(step, {**FROZEN, "step": step}, incremental="reference")
        assert steps(store) == [1, 2, 3]
        assert sum(checkpoint.size_bytes for checkpoint in store) > 25e6
        store.save(4, {**FROZEN, "step": 4})
        assert steps(store) == [4]
        assert {save.removed_because for save in store.history()} == {"", "over the budget of 10MB"}


def test_what_others_refer_to_stays_on_the_disk(tmp_path: Path) -> None:
    with open_store(tmp_path / "store", grace_seconds=0) as store:
        _, later = (store.save(step, {**FROZEN, "step": step}, incremental="reference") for step in (1, 2))
        store.save(3, {"step": 3})
        with pytest.raises(InvalidInput, match="step 2 refers to its files"):
            store.remove(1)
        store.remove(1, force=True)
        assert store.prune() == []
        assert later.verify().ok
        store.remove(2)
        assert [[item.step for item in store.prune()] for _ in range(2)] == [[2], [1]]


def test_all_go_and_a_job_begins_at_the_beginning(tmp_path: Path, store: CheckpointStore) -> None:
    with pytest.raises(InvalidInput, match="pinned"):
        store.remove_all()
    assert steps(store) == [1, 2, 3, 4, 5]
    store.remove_all(force=True)
    assert (steps(store), store.latest()) == ([], None)
    store.remove_all()  # there is nothing
    assert [item.step for item in store.prune()] == [1, 3, 4, 5], "the job may still run"
    with open_store(tmp_path / "store", grace_seconds=0) as job:
        state = {"epoch": -1}
        assert job.resume(state) is None
        assert state == {"epoch": -1}
        assert [item.step for item in job.prune()] == [2]
        job.save_directory(1, None)
        assert job.resume().step == 1
        assert job.verify_log() == []
    assert len(directories(tmp_path / "store")) == 1


def test_a_job_goes_on_saving_after_its_store_was_emptied(tmp_path: Path) -> None:
    with open_store(tmp_path / "store") as job, open_store(tmp_path / "store") as person:
        job.save(1, {"w": torch.ones(1 << 20)})
        person.remove(1, force=True)
        assert person.latest() is None
        saved = job.save(2, {"w": torch.ones(1 << 20)}, incremental="reference")
        person.prune()
        assert saved.verify().ok
        assert steps(person) == [2]


def test_a_reader_of_what_refers_to_others_keeps_their_files(tmp_path: Path) -> None:
    state = {"w": torch.ones(5000), "step": torch.zeros(1)}
    with open_store(tmp_path) as store:
        first, second = (store.save(step, state, incremental="reference") for step in (1, 2))
        store.save(3, state)
        assert {item.attempt for item in second.files} == {None, Path(first.uri).name}
        store.retain(KeepLatest(1))
    reading = second._files.held()
    with with_faults(open_store(tmp_path, grace_seconds=0), Once("create", "log/", reading.__enter__)) as pruner:
        pruner.prune()
        pruner.prune()
        assert pruner.trash() == []
        assert len(directories(tmp_path)) == 3
        reading.__exit__(None, None, None)
        pruner.prune()
    assert len(directories(tmp_path)) == 1


def test_what_was_restored_and_trashed_anew_begins_its_grace_anew(tmp_path: Path) -> None:
    with open_store(tmp_path, retention=KeepLatest(2)) as store:
        for step in (1, 2, 3):
            store.save(step, {"step": step})

    def again() -> None:
        with open_store(tmp_path) as person:
            person.restore(1, pin=False)
            person.remove(1)

    with with_faults(open_store(tmp_path, grace_seconds=0), Once("create", "log/", again)) as pruner:
        assert pruner.prune() == []
        assert [item.step for item in pruner.trash()] == [1]
        assert [item.step for item in pruner.prune()] == [1]


@pytest.mark.parametrize("moment", ["list", "create"])
def test_what_somebody_begins_to_follow_stays_in_an_object_store(moment: str) -> None:
    uri = f"memory://followed-{moment}"
    with open_store(uri) as store:
        first, _ = (store.save(step, {"step": step}) for step in (1, 2))
        store.remove(1)
    key = "log/" if moment == "create" else "leases/"  # the look at the leases, or the record that drops it
    with open_store(uri) as reader:
        reading = leases.hold(reader._job.storage, first._files.record.number)
        with with_faults(open_store(uri, grace_seconds=0), Once(moment, key, reading.__enter__)) as pruner:
            pruner.prune()
            names = [file.key for file in reader._job.storage.list(first._files.prefix)]
            assert any(name.endswith("ckptstore.json") for name in names)
        reading.__exit__(None, None, None)


def test_a_manifest_is_deleted_before_the_files_that_it_names(tmp_path: Path) -> None:
    deleted: list[str] = []

    def hook(call: Call) -> None:
        if call.verb == "delete" and call.phase == "before" and call.key.startswith("checkpoints/"):
            deleted.append(call.key)

    with with_faults(open_store(tmp_path / "store", grace_seconds=0), hook) as store:
        for step in (1, 2):
            save_tree(store, tmp_path, step)
        settle(store)
        store.retain(KeepLatest(1))
        store.prune()
    assert [key.endswith("ckptstore.json") for key in deleted] == [True, False]


def test_what_a_job_resumed_from_waits_in_the_trash(tmp_path: Path) -> None:
    with open_store(tmp_path / "store") as store:
        save_tree(store, tmp_path, 1)
    with open_store(tmp_path / "store", grace_seconds=0) as store:
        store.resume()
        save_tree(store, tmp_path, 1)
        settle(store)
        (item,) = store.trash()
        assert (item.goes, item.held_by) == (False, RESUMED_FROM)
        assert store.prune() == []
        assert len(directories(tmp_path / "store")) == 2


def test_a_step_in_the_trash_is_named_so_wherever_it_is_looked_up(tmp_path: Path) -> None:
    with open_store(tmp_path, group="solo") as store:
        for step in (1, 2):
            save_tree(store, tmp_path, step)
        store.remove(1)
        for look in (lambda: store[1], lambda: store.pin(1), lambda: store.remove(1), lambda: store.roll_back(1)):
            with pytest.raises(CheckpointGone, match="in the trash, from which `restore` brings it back"):
                look()
        with pytest.raises(CheckpointGone) as caught:
            store[9]
        assert "trash" not in str(caught.value)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Step 3 is live, steps 1 and 2 are in the trash."""
    with open_store(tmp_path / "store", retention=KeepLatest(1)) as store:
        for step in (1, 2, 3):
            save_tree(store, tmp_path, step, b"%d" % step * 1000)
        assert [item.step for item in store.trash()] == [1, 2]
    return tmp_path / "store"


def test_a_restored_checkpoint_is_pinned_and_stays(root: Path, tmp_path: Path) -> None:
    with open_store(root, retention=KeepLatest(1), grace_seconds=0) as store:
        restored = store.restore(2)
        assert (restored.step, restored.number) == (2, store[2].number)
        restored.verify().raise_if_damaged()
        found = [(entry.checkpoint.step, entry.is_pinned, entry.is_latest) for entry in store.entries()]
        assert found == [(2, True, False), (3, False, True)]
        save_tree(store, tmp_path, 4)
        store.prune()
        assert steps(store)[0] == 2
        assert store.trash() == []
        store[2].verify().raise_if_damaged()


def test_without_a_pin_the_next_save_drops_it_for_a_whole_grace_period(root: Path, tmp_path: Path) -> None:
    with open_store(root, retention=KeepLatest(1)) as store:
        for path in (root / "log").iterdir():  # an hour passes
            os.utime(path, (path.stat().st_atime - 3000, path.stat().st_mtime - 3000))
        assert max(item.due_in_seconds for item in store.trash()) < 700
        store.restore(2, pin=False)
        store.resume()
        save_tree(store, tmp_path, 4)
        (left,) = (item for item in store.trash() if item.step == 2)
        assert left.due_in_seconds > 3500


def test_a_roll_back_is_undone(tmp_path: Path) -> None:
    with open_store(tmp_path / "store") as store:
        for step in (1, 2, 3):
            save_tree(store, tmp_path, step)
        store.roll_back(1)
        assert store.restore(3, pin=False) == store.latest()
        assert store.restore(2, pin=False).step == 2
        assert steps(store) == [1, 2, 3]
        assert store.trash() == []


def test_of_several_of_a_step_the_last_comes_back_or_the_one_with_the_number(tmp_path: Path) -> None:
    with open_store(tmp_path / "store") as store:
        save_tree(store, tmp_path, 1)
        older, newer = (save_tree(store, tmp_path, 2, data) for data in (b"old", b"new"))
        with pytest.raises(InvalidInput, match=r"Step 2 is live, so nothing was restored\. .* roll back"):
            store.restore(2, number=older.number)
        store.roll_back(1)
        assert store.restore(2, pin=False).number == newer.number
        store.roll_back(1)
        assert older.number is not None
        assert store.restore(2, number=older.number).number == older.number
        assert Path(store[2].uri, "f").read_bytes() == b"old"


def test_what_is_not_in_the_trash_is_named_with_what_is(root: Path) -> None:
    with open_store(root) as store:
        before = sorted(path.name for path in (root / "log").iterdir())
        text = r"no checkpoint of step 7 in the trash any more; there is: 1 \(number 2\), 2 "
        with pytest.raises(CheckpointGone, match=text):
            store.restore(7)
        with pytest.raises(CheckpointGone, match=r"step 2 with number 99"):
            store.restore(2, number=99)
        with pytest.raises(InvalidInput, match="Step 3 is live"):
            store.restore(3)
        assert sorted(path.name for path in (root / "log").iterdir()) == before


@pytest.mark.parametrize("name", ["f", "ckptstore.json"])
def test_nothing_comes_back_without_all_its_files(root: Path, name: str) -> None:
    (directory,) = (root / "checkpoints").glob("step-0000000002-*")
    (directory / name).unlink()
    with open_store(root) as store:
        error, text = (CheckpointDamaged, "f is missing") if name == "f" else (CheckpointGone, "has no manifest")
        with pytest.raises(error, match=text):
            store.restore(2)
        assert steps(store) == [3]
        assert store.restore(1).verify().ok


def test_the_files_of_others_that_it_refers_to_count(tmp_path: Path) -> None:
    state = {"a": torch.arange(400_000.0), "epoch": 1}
    with open_store(tmp_path / "store", grace_seconds=0) as store:
        store.save(1, state, incremental=True)
        store.save(2, {**state, "epoch": 2}, incremental="reference")
        store.save(3, {"b": torch.ones(3)})
        store.pin(3)
        base, user = store[1], store[2]
        store.retain(KeepLatest(1))
        assert store.restore(2).number == user.number
        assert store.prune() == [], "what the restored checkpoint refers to stays"
        user.verify().raise_if_damaged()
        store.unpin(2)
        store.retain(KeepLatest(1))
        for path in Path(base.uri).glob("*.distcp"):
            path.unlink()
        with pytest.raises(CheckpointDamaged, match="is missing"):
            store.restore(2)


def test_where_there_is_no_trash(tmp_path: Path) -> None:
    storage = open_storage(tmp_path / "run")
    read_or_create_store_json(storage, kept_by=KEPT_BY_RAY)
    storage.close()
    with open_store(tmp_path / "run") as store, pytest.raises(InvalidInput, match="kept by Ray, which has no trash"):
        store.restore(1)
    assert not (tmp_path / "run/log").exists()


@pytest.mark.parametrize(("verb", "key"), [("read", "step-"), ("list", "step-"), ("create", "log/")])
def test_a_prune_that_is_faster_leaves_nothing_to_restore(root: Path, verb: str, key: str) -> None:
    """At each look of the restore: the manifest, the files, and the record, whose number the prune takes."""
    with open_store(root, grace_seconds=0) as pruner:
        hook = Once(verb, key, pruner.prune)
        with with_faults(open_store(root), hook) as store, pytest.raises(CheckpointGone, match="in the trash any more"):
            store.restore(2)
        assert hook.action is None
        assert (steps(pruner), pruner.trash()) == ([3], [])
        assert [path.name[:15] for path in (root / "checkpoints").iterdir()] == ["step-0000000003"]


@pytest.mark.parametrize(("verb", "key"), [("read", "log/"), ("create", "log/")])
def test_a_restore_that_is_faster_keeps_its_files(root: Path, verb: str, key: str) -> None:
    with open_store(root) as store:
        hook = Once(verb, key, lambda: store.restore(2))
        with with_faults(open_store(root, grace_seconds=0), hook) as pruner:
            assert [item.step for item in pruner.prune()] == [1]
        assert hook.action is None
        assert steps(store) == [2, 3]
        store[2].verify().raise_if_damaged()


@pytest.mark.parametrize(("verb", "key"), [("create", "log/"), ("delete", "checkpoints/")])
def test_a_killed_prune_leaves_all_of_it_or_nothing(root: Path, verb: str, key: str) -> None:
    """It ends at its record, or at its first deletion: the checkpoint is in the trash whole, or gone for good."""

    def die() -> None:
        raise KeyboardInterrupt

    with with_faults(open_store(root, grace_seconds=0), Once(verb, key, die)) as pruner, suppress(KeyboardInterrupt):
        pruner.prune()
    with open_store(root) as store:
        if verb == "create":
            assert store.restore(2).verify().ok
        else:
            with pytest.raises(CheckpointGone, match="in the trash any more"):
                store.restore(2)
