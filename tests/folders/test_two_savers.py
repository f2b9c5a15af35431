"""Savers that say a step and savers that say none in one folder, and files that are one checkpoint together."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ckptstore import CheckpointStore, open_store
from ckptstore.tools.run.committer import Committer
from ckptstore.tools.run.folders import Folder, JobSeen, newest_first, restore_folder
from tests.folders.test_finished_property import zipped

JOB = JobSeen(frozenset(), is_started=True)


def commit(store: CheckpointStore, folder: Path) -> None:
    """Commit all that is finished, as an agent that has just been started does."""
    committer = Committer(store=store, folder=Folder(folder), job=lambda: JOB, interval_seconds=0.001, began_at=0.0)
    for _ in range(3):
        committer._round()
    assert committer.outcome().passed == {}


@pytest.mark.parametrize(
    ("numbered", "other"),
    [("weights.{:02d}-0.5.keras", "best.keras"), ("checkpoint_{}.pt", "best_model_{}_neg_loss=-0.3056.pt")],
)
def test_a_best_without_a_step_keeps_no_step_from_the_others(tmp_path: Path, numbered: str, other: str) -> None:
    """They go on counting for both, and both come back: a framework goes on from the numbered one alone."""
    out, new = tmp_path / "out", tmp_path / "new"
    out.mkdir()
    with open_store(tmp_path / "store", durable=False) as store:
        for epoch in (1, 2, 3):
            (out / numbered.format(epoch)).write_bytes(zipped(epoch, ""))
            commit(store, out)
            (out / other.format(epoch)).write_bytes(zipped(epoch, "best" * epoch))
            commit(store, out)
        names = [checkpoint.metadata["folder"]["name"] for checkpoint in store]
        assert names == [name.format(epoch) for epoch in (1, 2, 3) for name in (numbered, other)]
        report = restore_folder(Folder(new), newest_first(store))
        assert report is not None
        assert (report.name, report.best, report.is_restored) == (numbered.format(3), other.format(3), True)
        assert {path.name for path in new.iterdir()} == {numbered.format(3), other.format(3)}

        (new / numbered.format(4)).write_bytes(zipped(4, "")[:-9])  # the kill came in the middle of it
        report = restore_folder(Folder(new), newest_first(store))
        assert report is not None
        assert len(report.moved_aside) == 1
        assert not (new / numbered.format(4)).exists()
        (new / numbered.format(4)).write_bytes(zipped(4, ""))
        report = restore_folder(Folder(new), newest_first(store))
        assert report is not None
        assert (report.name, report.is_restored) == (numbered.format(3), False)
        commit(store, new)
        assert store.latest().metadata["folder"]["name"] == numbered.format(4)  # type: ignore[union-attr]


def test_a_backup_of_keras_is_the_weights_and_the_epoch_of_them(tmp_path: Path) -> None:
    """Weights with the epoch of those before them would be trained once more."""
    out, new = tmp_path / "out", tmp_path / "new"
    out.mkdir()
    weights, epoch = out / "latest.weights.h5", out / "training_metadata.json"
    with open_store(tmp_path / "store", durable=False) as store:
        for number in (1, 2):
            weights.write_bytes(hdf5(number))
            epoch.write_text(f'{{"epoch": {number}}}')
            commit(store, out)
        weights.write_bytes(hdf5(3))
        os.utime(epoch, ns=(0, weights.stat().st_mtime_ns - 10**10))
        commit(store, out)
        assert len(store) == 2
        restore_folder(Folder(new), newest_first(store))
        assert (new / weights.name).read_bytes() == hdf5(2)
        assert (new / epoch.name).read_text() == '{"epoch": 2}'
        epoch.write_text('{"epoch": ')
        commit(store, out)
        assert len(store) == 2


def hdf5(number: int) -> bytes:
    """The superblock of a file of 64 bytes."""
    text = b"\x89HDF\r\n\x1a\n\x02\x08\x08\x00" + bytes(16) + (64).to_bytes(8, "little") + bytes([number])
    return text.ljust(64, b"\0")


def test_the_copy_of_the_best_belongs_to_the_newest(tmp_path: Path) -> None:
    out, new = tmp_path / "out", tmp_path / "new"
    out.mkdir()
    with open_store(tmp_path / "store", durable=False) as store:
        (out / "checkpoint.pth.tar").write_bytes(zipped(1, "a"))
        (out / "model_best.pth.tar").write_bytes(zipped(1, "a"))
        commit(store, out)
        (out / "checkpoint.pth.tar").write_bytes(zipped(2, "b"))
        commit(store, out)
        assert len(store) == 2
        restore_folder(Folder(new), newest_first(store))
        assert {path.name: path.read_bytes() for path in new.iterdir()} == {
            "checkpoint.pth.tar": zipped(2, "b"),
            "model_best.pth.tar": zipped(1, "a"),
        }
