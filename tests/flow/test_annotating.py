"""Metrics that come after the save: written by other processes beside the job, used by all that looks at metrics."""

from __future__ import annotations

import math
import os
import pickle
import time
from pathlib import Path

import pytest
from trees import make_tree, steps

from ckptstore import (
    Checkpoint,
    CheckpointGone,
    CkptstoreError,
    InvalidInput,
    InvalidMetric,
    KeepBest,
    KeepLatest,
    StoreFenced,
    open_store,
)
from ckptstore.interchange.copying import copy_store
from ckptstore.interchange.salvage import salvage_store
from ckptstore.testing.ranks import run_ranks
from ckptstore.transfer.opened import open_place

SAVES, VALUES = 4, 3


def save_or_annotate(root: Path, source: Path) -> None:
    """Rank 0 is a job that saves; each other one an evaluation that annotates all that it meets."""
    rank = int(os.environ["RANK"])
    with open_store(root, group="solo") as store:
        if rank == 0:
            for step in range(SAVES):
                store.save_directory(step, source, metrics={"loss": 1.0})
            return
        while len(store) < SAVES:
            time.sleep(0.02)
        for value in range(VALUES):
            for checkpoint in store:
                store.annotate(checkpoint, {f"by {rank}": value, f"step {checkpoint.step} by {rank}": value})


def test_several_processes_annotate_beside_a_job(tmp_path: Path) -> None:
    source = make_tree(tmp_path / "source", {"f": b"x"})
    run_ranks(3, save_or_annotate, tmp_path / "store", source)
    with open_store(tmp_path / "store") as store:
        last = float(VALUES - 1)
        for checkpoint in store:
            own = {f"step {checkpoint.step} by {rank}": last for rank in (1, 2)}
            assert checkpoint.metrics == {"loss": 1.0, "by 1": last, "by 2": last, **own}
        assert [save.metrics for save in store.history()] == [checkpoint.metrics for checkpoint in store]
        assert store.verify_log() == []


def test_retention_and_best_go_by_what_was_annotated(tmp_path: Path) -> None:
    source = make_tree(tmp_path / "source", {"f": b"x"})
    policy = KeepBest(1, "eval_loss") | KeepLatest(2)
    with (
        open_store(tmp_path / "store", retention=policy, missing="worst") as job,
        open_store(tmp_path / "store", group="solo") as evaluation,
    ):
        for step, loss in enumerate((3.0, 1.0, 2.0, 2.5)):
            job.save_directory(step, source)
            evaluation.annotate(step, {"eval_loss": loss})
        job.save_directory(4, source)  # the job was not fenced
        assert steps(job) == [1, 3, 4]
        best = evaluation.best("eval_loss")
        assert (best.step, pickle.loads(pickle.dumps(best)).metrics) == (1, {"eval_loss": 1.0})
        evaluation.annotate(1, {"eval_loss": 9.0})
        assert job.best("eval_loss") == job[3], "the later value counts"
        assert best.metrics == {"eval_loss": 1.0}, "as of when it was looked up"
        evaluation.annotate(job[4], {"x": math.nan})
        for found in (job.resume(), evaluation.latest()):
            assert str(found.metrics) == "{'x': nan}"


def test_what_was_moved_away_meanwhile_is_annotated_all_the_same(tmp_path: Path) -> None:
    source = make_tree(tmp_path / "source", {"f": b"x"})
    with open_store(tmp_path / "store") as store, open_store(tmp_path / "store", grace_seconds=0) as cleaner:
        first, second = (store.save_directory(1, source) for _ in range(2))
        store.annotate(first, {"a": 1})
        assert (first.number != second.number, store[1].metrics) == (True, {}), "its step was saved again"
        store.annotate(1, {"b": 2})
        store.annotate(Checkpoint.from_uri(second.uri), {"c": 3})
        store.save_directory(2, source)
        store.remove(1)
        store.annotate(1, {"d": 4})
        assert store.restore(1, number=second.number, pin=False).metrics == {"b": 2.0, "c": 3.0, "d": 4.0}
        store.remove(1)
        cleaner.prune()
        for gone in (1, first, second):
            with pytest.raises(CheckpointGone):
                store.annotate(gone, {"a": 1})
        assert [save.metrics for save in store.history()] == [{"a": 1}, {"b": 2, "c": 3, "d": 4}, {}]


def test_copies_have_what_was_annotated(tmp_path: Path) -> None:
    source = make_tree(tmp_path / "source", {"f": b"x"})
    with open_store(tmp_path / "store") as store:
        for step in (1, 2):
            store.save_directory(step, source, metrics={"loss": 1.0})
        store.annotate(1, {"eval_loss": 0.5})
        for metrics in ({}, {"late": 1.0}):
            if metrics:
                store.annotate(2, {**metrics, "loss": 2.0})
            target = open_place(tmp_path / "copy")
            copy_store(store, target)
            target.close()
            with open_store(tmp_path / "copy") as copy:
                assert [item.metrics for item in copy] == [item.metrics for item in store]
                assert copy.verify_log() == []
        wanted = [item.metrics for item in store]
    log = tmp_path / "store/log"
    (log / "0000000002.json").write_bytes(b"torn")
    with_faults = open_place(tmp_path / "store")
    saved = open_place(tmp_path / "salvaged")
    salvage_store(with_faults, saved)
    with_faults.close()
    saved.close()
    with open_store(tmp_path / "salvaged") as salvaged:
        assert [item.metrics for item in salvaged] == [{"loss": 1.0}, wanted[1]], "what can be read of it"


def test_what_cannot_be_annotated_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    source = make_tree(tmp_path / "source", {"f": b"x"})
    with open_store(tmp_path / "other") as store:
        foreign = store.save_directory(1, source)
    with open_store(tmp_path / "store") as store:
        with pytest.raises(CkptstoreError, match="There is no store"):
            store.annotate(1, {"a": 1})
        store.save_directory(1, source)
        before = len(list((tmp_path / "store/log").iterdir()))
        with pytest.raises(InvalidInput, match="of another store"):
            store.annotate(foreign, {"a": 1})
        with pytest.raises(CheckpointGone, match="live ones: 1"):
            store.annotate(2, {"a": 1})
        for metrics in ({}, {"a": "x"}, {"": 1.0}, {"a": 2**70 + 1}, [1]):
            with pytest.raises(InvalidMetric):
                store.annotate(1, metrics)
        assert len(list((tmp_path / "store/log").iterdir())) == before
        with open_store(tmp_path / "store") as later:
            later.resume()
            with pytest.raises(StoreFenced):
                store.annotate(1, {"a": 1})
