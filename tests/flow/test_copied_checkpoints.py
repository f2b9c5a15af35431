"""Copies of stores: each checkpoint comes whole and once, in its order, whatever breaks off or is changed meanwhile."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from trees import copied, directories, make_tree, read_tree, save_tree, steps

from ckptstore import Checkpoint, CheckpointStore, InvalidInput, KeepAll, KeepEvery, KeepLatest, KeepSince, open_store
from ckptstore.errors import StoreFenced
from ckptstore.extensions.exchange import copying
from ckptstore.transfer.opened import open_place


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A store whose third job has saved, too."""
    for step in (1, 2, 3):
        with open_store(tmp_path / "store") as store:
            save_tree(store, tmp_path, step, data=b"%d" % step * 1000)
    return tmp_path / "store"


@pytest.fixture
def store(root: Path) -> Iterator[CheckpointStore]:
    with open_store(root, retention=KeepAll()) as opened:
        yield opened


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "copy"


def whole(store: CheckpointStore) -> list[int]:
    return [checkpoint.step for checkpoint in store if checkpoint.verify().ok]


def test_a_store_is_copied_with_a_log_of_its_own_and_goes_on(
    store: CheckpointStore, tmp_path: Path, target: Path
) -> None:
    store.pin(2)
    store[3].set_metadata({"note": "set later"})
    assert copied(store, target).steps == (1, 2, 3)
    with open_store(target) as copy:
        log = copy._job.log
        newest = log.newest()
        orders = [record.entry.order for record in log.records(newest.state.live)]
        assert orders == [(newest.state.epoch, number) for number in (1, 2, 3)], "it counts its saves anew"
        shutil.rmtree(copy[2].uri)
    save_tree(store, tmp_path, 4)
    again = copied(store, target)
    assert (again.steps, again.present) == ((4,), (1, 2, 3))
    with open_store(target) as copy:
        assert [(entry.checkpoint.step, entry.is_pinned) for entry in copy.entries()] == [
            *((1, False), (2, True), (3, False), (4, False))
        ]
        assert copy[3].metadata == {"note": "set later"}
        assert copy[3].verify().ok
        assert not Path(copy[2].uri).exists()
        assert copy.resume().step == 4
        assert save_tree(copy, tmp_path, 5) == copy.latest()
        assert copy.verify_log() == []


def test_what_comes_late_does_not_become_the_latest(store: CheckpointStore, tmp_path: Path, target: Path) -> None:
    store.remove(2, force=True)
    copied(store, target)
    store.restore(2)
    report = copied(store, target)
    assert (report.steps, report.present) == ((), (1, 3))
    assert "become its latest" in next(iter(report.left_out.values()))
    save_tree(store, tmp_path, 4)
    assert copied(store, target).steps == (4,)
    with open_store(target) as copy:
        assert steps(copy) == [1, 3, 4]
        copy.retain(KeepLatest(1))
    assert len(copied(store, target).left_out) == 2  # the trash of a copy holds what its versions of weights need
    with open_store(target) as copy:
        assert copy.latest().step == 4


@pytest.mark.parametrize("is_late", [False, True])
def test_pins_come_with_a_copy_that_goes_on(store: CheckpointStore, target: Path, is_late: bool) -> None:
    if is_late:
        copied(store, target)
    store.pin(1)
    if not is_late:
        with patch.object(copying, "Pin", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
            copied(store, target)
    copied(store, target)
    with open_store(target) as copy:
        assert [entry.checkpoint.step for entry in copy.entries() if entry.is_pinned] == [1]


def test_a_step_that_was_saved_again_replaces_its_copy(store: CheckpointStore, tmp_path: Path, target: Path) -> None:
    copied(store, target)
    save_tree(store, tmp_path, 3)
    copied(store, target)
    with open_store(target) as copy:
        assert steps(copy) == steps(store) == [1, 2, 3]


def at_each_commit(action: Callable[[], object]) -> Any:
    """Do something whenever the files of a checkpoint are copied, and nothing is committed yet."""
    original = copying.copy_checkpoint

    def copied_then(*args: Any, **keywords: Any) -> Any:
        report = original(*args, **keywords)
        action()
        return report

    return patch.object(copying, "copy_checkpoint", copied_then)


def collect(root: Path, *, claim: bool = False) -> Any:
    with open_store(root) as store:
        return store.collect_garbage(claim=claim)


def test_what_a_running_copy_has_written_is_no_garbage(root: Path, tmp_path: Path, target: Path) -> None:
    with at_each_commit(lambda: collect(target)):
        assert copied(root, target).steps == (1, 2, 3)
    with open_store(target) as store:
        assert whole(store) == [1, 2, 3]
        save_tree(store, tmp_path, 4)
        assert whole(store) == [1, 2, 3, 4]


def test_a_later_claim_ends_a_copy_and_makes_garbage_of_it(root: Path, target: Path) -> None:
    with at_each_commit(lambda: collect(target, claim=True)), pytest.raises(StoreFenced):
        copied(root, target)
    assert directories(target) == []
    assert copied(root, target).steps == (1, 2, 3)
    with open_store(target) as store:
        assert whole(store) == [1, 2, 3]


def test_a_copy_that_broke_off_is_taken_over_and_leaves_nothing(root: Path, target: Path) -> None:
    def die() -> None:
        raise KeyboardInterrupt

    with at_each_commit(die), pytest.raises(KeyboardInterrupt):
        copied(root, target)
    (torn,) = (target / "checkpoints").iterdir()
    (torn / "f").chmod(0o600)
    (torn / "f").write_bytes(b"2" * 1000)  # of the right size, and yet not whole
    report = copied(root, target)
    assert (report.steps, report.num_found, report.num_copied) == ((1, 2, 3), 1, 5)
    assert len(directories(target)) == 3
    again = copied(root, target)
    assert (again.steps, again.present) == ((), (1, 2, 3))
    with open_store(target) as store:
        assert whole(store) == [1, 2, 3]
    found = collect(target, claim=True)
    assert (found.attempts, found.left) == ({}, {})


def test_a_copy_takes_nothing_from_the_trash_of_its_target(root: Path, target: Path) -> None:
    copied(root, target)
    with open_store(target) as store:
        trashed = [Path(store[step].uri) for step in (2, 3)]
        store.roll_back(1)
        assert copied(root, target).steps == (2, 3)
        assert all(read_tree(path) for path in trashed)
        assert [item.step for item in store.trash()] == [2, 3]
        assert whole(store) == [1, 2, 3]


def test_one_checkpoint_is_copied_and_goes_on_where_it_broke_off(
    store: CheckpointStore, tmp_path: Path, target: Path
) -> None:
    files = {f"f{index}": os.urandom(1000) for index in range(10)}
    checkpoint, place = store.save_directory(4, make_tree(tmp_path / "s", files)), open_place(str(target))
    make_tree(target, {name: files[name] for name in ("f0", "f1")} | {"f2": b"z" * 1000})
    report = copying.copy_checkpoint(checkpoint, place)
    assert (report.num_copied, report.num_found) == (8, 2)
    assert read_tree(target) == files
    assert Checkpoint.from_directory(target).verify().ok
    manifest = target / "ckptstore.json"
    data = manifest.read_bytes()
    for torn in (b"", data[:100]):  # killed while it wrote that
        manifest.unlink()
        manifest.write_bytes(torn)
        copying.copy_checkpoint(checkpoint, place)
        assert manifest.read_bytes() == data
        manifest.unlink()
        manifest.write_bytes(torn + b"x")
        with pytest.raises(InvalidInput, match="Another checkpoint"):
            copying.copy_checkpoint(checkpoint, place)
    place.close()


def test_a_copy_refuses_a_place_that_is_taken(store: CheckpointStore, tmp_path: Path, target: Path) -> None:
    with open_store(target) as other:
        save_tree(other, tmp_path, 1)
    with pytest.raises(InvalidInput, match="Another store"):
        copied(store, target)
    make_tree(tmp_path / "c", {"mine": b"1"})
    place = open_place(str(tmp_path / "c"))
    with pytest.raises(InvalidInput, match="mine"):
        copying.copy_checkpoint(store[1], place)
    place.close()


def test_ages_are_those_of_the_records_in_a_copy_too(root: Path, tmp_path: Path, target: Path) -> None:
    with open_store(root) as store:
        for hours, checkpoint in zip((5, 3, 0), store, strict=True):
            os.utime(root / f"log/{checkpoint.number:010}.json", (0, time.time() - hours * 3600))
    copied(root, target)
    with open_store(target, retention=KeepEvery(seconds=3600)) as store:
        save_tree(store, tmp_path, 4)
        assert steps(store) == [1, 2, 3, 4]
    with open_store(target, retention=KeepSince(4 * 3600)) as store:
        save_tree(store, tmp_path, 5)
        assert steps(store) == [2, 3, 4, 5]
