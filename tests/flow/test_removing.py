"""Checkpoints are removed by hand: into the trash, and never what somebody needs unless it is forced."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from trees import Once, directories, save_tree, settle, steps

from ckptstore import CheckpointGone, CheckpointStore, InvalidInput, KeepLatest, KeepWithin, open_store
from ckptstore.checkpoint import files_behind
from ckptstore.format.changes import RESUMED_FROM
from ckptstore.format.layout import MANIFEST_NAME
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
    with open_store(tmp_path) as store:
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
    reading = files_behind(second).held()
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
        reading = leases.hold(reader._job.storage, files_behind(first).record.number)
        with with_faults(open_store(uri, grace_seconds=0), Once(moment, key, reading.__enter__)) as pruner:
            pruner.prune()
            names = [file.key for file in reader._job.storage.list(files_behind(first).prefix)]
            assert any(name.endswith(MANIFEST_NAME) for name in names)
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
    assert [key.endswith(MANIFEST_NAME) for key in deleted] == [True, False]


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
