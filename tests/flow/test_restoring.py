"""What is in the trash comes back whole, or not at all: rules, errors, and a prune at every moment."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from trees import Once, save_tree, steps

from ckptstore import (
    CheckpointDamaged,
    CheckpointGone,
    InvalidInput,
    KeepLatest,
    open_store,
)
from ckptstore.log.identity import KEPT_BY_RAY, read_or_create_store_json
from ckptstore.storage.open import open_storage
from ckptstore.testing import with_faults


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
        assert [(entry.checkpoint.step, entry.is_pinned, entry.is_latest) for entry in store.entries()] == [
            (2, True, False),
            (3, False, True),
        ]
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
        with pytest.raises(
            CheckpointGone, match=r"no checkpoint of step 7 in the trash any more; there is: 1 \(number 2\), 2 "
        ):
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


@pytest.mark.parametrize(
    ("verb", "key"),
    [("read", "step-0000000002"), ("list", "step-0000000002"), ("create", "log/")],
)
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

    with (
        with_faults(open_store(root, grace_seconds=0), Once(verb, key, die)) as pruner,
        suppress(KeyboardInterrupt),
    ):
        pruner.prune()
    with open_store(root) as store:
        if verb == "create":
            assert store.restore(2).verify().ok
        else:
            with pytest.raises(CheckpointGone, match="in the trash any more"):
                store.restore(2)
