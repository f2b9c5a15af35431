"""Checkpoints are removed by hand: into the trash, and never what somebody needs unless it is forced."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from trees import directories, make_tree, steps

from ckptstore import CheckpointGone, CheckpointStore, InvalidInput, KeepWithin, open_store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[CheckpointStore]:
    """Steps 1 and 2 of a first job; 3, 4 and 5 of one that resumed from 2, of which 3 is pinned."""
    source = make_tree(tmp_path / "source", {"f": b"x"})
    with open_store(tmp_path / "store") as first:
        for step in (1, 2):
            first.save_directory(step, source)
    with open_store(tmp_path / "store") as second:
        second.resume()
        for step in (3, 4, 5):
            second.save_directory(step, source)
        second.pin(3)
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


def test_a_budget_counts_the_files_that_checkpoints_share_once(tmp_path: Path) -> None:
    frozen = {f"w{index}": torch.full((1 << 19,), float(index)) for index in range(4)}
    with open_store(tmp_path / "store", retention=KeepWithin("10MB")) as store:
        for step in (1, 2, 3):
            store.save(step, {**frozen, "step": step}, incremental="reference")
        assert steps(store) == [1, 2, 3]
        assert sum(checkpoint.size_bytes for checkpoint in store) > 25e6
        store.save(4, {**frozen, "step": 4})
        assert steps(store) == [4]
        assert {save.removed_because for save in store.history()} == {"", "over the budget of 10MB"}


def test_what_others_refer_to_stays_on_the_disk(tmp_path: Path) -> None:
    frozen = {f"w{index}": torch.full((1 << 19,), float(index)) for index in range(4)}
    with open_store(tmp_path / "store", grace_seconds=0) as store:
        store.save(1, {**frozen, "step": 1}, incremental="reference")
        later = store.save(2, {**frozen, "step": 2}, incremental="reference")
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
        job.save_directory(1, tmp_path / "source")
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
