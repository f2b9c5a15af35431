"""What one process sees of fast checkpoints without the others: the newest, and all that are at hand."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from typing import Any

import pytest
import torch
from fast_jobs import Jobs, save, settle, state_of, steps
from trees import flip

from ckptstore import (
    CheckpointDamaged,
    CheckpointGone,
    CheckpointStore,
    FastTier,
    InvalidInput,
    KeepEvery,
    StorageError,
    open_store,
)

BIG = 4_000_000
"""Elements of a tensor that is split over ranks."""


def beside(jobs: Jobs, node: str) -> CheckpointStore:
    """The store as an evaluation on a node opens it, which belongs to no job."""
    return open_store(jobs.root / "store", group="solo", fast=FastTier(jobs.disk(node), node=node))


def loaded(checkpoint: Any, step: int) -> None:
    """Everything that can be done with a checkpoint works, and gives what was saved."""
    state = state_of(-1)
    checkpoint.load(state, per_rank="first")
    assert (state["step"], state["w"].unique().tolist()) == (step, [float(step)])
    assert {"w", "own"} <= set(checkpoint.keys())
    assert checkpoint.tensors["w"].shape == (100_000,)
    report = checkpoint.verify()
    assert (report.ok, report.num_read) == (True, len(checkpoint.files))
    with checkpoint.as_directory() as path:
        assert {file.name for file in path.iterdir()} >= {receipt.name for receipt in checkpoint.files}


def listed(store: CheckpointStore) -> list[tuple[int, bool, bool]]:
    return [(one.checkpoint.step, one.is_durable, one.is_fast) for one in store.entries(fast=True)]


def test_the_newest_wherever_it_is(jobs: Jobs, skipped: list[str]) -> None:
    """Step 1 is in the store and on the node, 2 on the node alone; then 3 is void, and 4 in the store alone."""

    def flow(store: CheckpointStore, rank: int) -> None:
        store.resume()
        store.save_async(1, state_of(1)).durable()
        store.save(2, state_of(2))

    jobs.run("a", flow, drain_bytes_per_second=None, drain=KeepEvery(steps=1000), keep=9)
    with beside(jobs, "a") as store:
        found = store.latest(fast=True)
        assert (found.step, found.number, found.is_durable) == (2, None, False)
        loaded(found, 2)
        assert listed(store) == [(1, True, True), (2, False, True)]
        (latest,) = store.entries()
        assert (latest.checkpoint.step, latest.is_durable, latest.is_fast) == (1, True, False)
        assert store.latest() == latest.checkpoint

    def back(store: CheckpointStore, rank: int) -> None:
        store.resume()
        store.save(3, state_of(3))
        store.roll_back(1)

    jobs.run("a", back, keep=9)
    with beside(jobs, "a") as store:
        found = store.latest(fast=True)
        assert (found.step, found.is_durable) == (1, True)
        assert listed(store) == [(1, True, True)]
        assert skipped == []  # what is void is nothing to act on
    with open_store(jobs.root / "store") as store:
        store.save(4, state_of(4))
        with pytest.raises(InvalidInput, match="without a fast tier"):
            store.latest(fast=True)
    with beside(jobs, "a") as store:
        assert [entry.checkpoint.step for entry in store.entries(fast=True)] == [1, 4]
        assert store.latest(fast=True) == store.latest()
    with beside(jobs, "b") as store:  # nothing was ever there, and nothing is created
        assert store.latest(fast=True) == store.latest()
        assert not jobs.disk("b").exists()


def test_what_cannot_be_used_is_passed_over(jobs: Jobs, skipped: list[str]) -> None:
    jobs.run("a", save(1, 2, 3, 4), keep=9)
    paths = jobs.attempts("a")
    (paths[3] / "state-rank=00000-00.distcp").unlink()
    flip(paths[2] / "fast.json")
    with beside(jobs, "a") as store:
        found = store.latest(fast=True)
        assert found.step == 2
        assert len(skipped) == 2
        assert f"{paths[2].name} on a: " in skipped[0]
        assert "not here with its size: state-rank=00000-00.distcp" in skipped[1]
        flip(paths[1] / "state-rank=00000-00.distcp")
        assert [problem.fault for problem in found.verify().problems] == ["flipped"]
        with pytest.raises(CheckpointDamaged, match="state-rank=00000"):
            found.load(state_of(-1))
    shutil.copytree(jobs.root / "store", jobs.root / "copy")
    with open_store(jobs.root / "copy") as copy:  # another history: its epochs are other jobs
        shutil.rmtree(jobs.root / "copy/log")
        copy.save(9, state_of(9))
    with open_store(jobs.root / "copy", group="solo", fast=FastTier(jobs.disk("a"), node="a")) as copy:
        skipped.clear()
        assert copy.latest(fast=True).step == 9
        assert sum("another history" in reason for reason in skipped) == 3
    jobs.disk("a").chmod(0o755)
    with beside(jobs, "a") as store, pytest.raises(InvalidInput, match="lets other users in"):
        store.latest(fast=True)


def test_a_file_on_another_node(jobs: Jobs) -> None:
    """A process beside the job reads what is on its node; one of the job reaches the other nodes."""

    def flow(store: CheckpointStore, rank: int) -> list[float]:
        store.save(1, {**state_of(1, rank), "big": torch.ones(BIG)})
        found = store.latest(fast=True)
        assert not found.is_durable
        state = state_of(-1, rank)
        found.load(state)
        assert found.verify().num_read == len(found.files)
        return [float(state["w"].mean()), float(state["own"][0])]

    assert jobs.run("ab", flow) == [[1.0, 100.0], [1.0, 101.0]]
    with beside(jobs, "a") as store:
        found = store.latest(fast=True)
        report = found.verify()
        assert report.ok
        assert 0 < report.num_read < len(found.files)  # those of its own node
        for read in (lambda: found.load({"big": torch.zeros(BIG)}), lambda: found.as_directory().__enter__()):
            with pytest.raises(StorageError, match="lies on b, which this process does not reach") as caught:
                read()
            error = caught.value
            assert (error.step, error.rank, error.retryable) == (1, 1, False)
            assert error.file is not None
            assert "rank=00001" in error.file
    shutil.rmtree(jobs.disk("b"))
    jobs.run("ab", save(2), copies=2)
    with beside(jobs, "b") as store:
        found = store.latest(fast=True)
        assert found is not None
        loaded(found, 2)


def test_it_becomes_durable_and_leaves_the_node(jobs: Jobs) -> None:
    """What was found as a fast checkpoint is read from the store then; what did not come there is gone."""
    tier = FastTier(jobs.disk("a"), node="a", keep=1, drain=KeepEvery(steps=1000))
    with open_store(jobs.root / "store", fast=tier) as store, beside(jobs, "a") as other:
        store.save(1, state_of(1))
        first = other.latest(fast=True)
        pending = store.save_async(2, state_of(2))
        pending.result()
        second = other.latest(fast=True)
        assert second.step == 2
        pending.durable()
        store.save(3, state_of(3))
        settle(store)
        assert steps(jobs, "a") == [3]
        assert second.is_durable
        loaded(second, 2)
        assert first.is_durable  # the first is always due
        store.save(4, state_of(4))
        third = other.latest(fast=True)
        store.save(5, state_of(5))
        settle(store)
        with pytest.raises(CheckpointGone, match="Step 4 was deleted from the disk of this node"):
            third.load(state_of(-1))


READER = """
import sys
from ckptstore import FastTier, open_store
store = open_store(sys.argv[1], group="solo", fast=FastTier(sys.argv[2], node="a"))
with store.latest(fast=True)._files.held():
    print("reads", flush=True)
    sys.stdin.read()
"""


def test_what_another_process_reads_stays(jobs: Jobs) -> None:
    """Until it has ended, by itself or not."""
    tier = FastTier(jobs.disk("a"), node="a", keep=1, drain=KeepEvery(steps=1000))
    with open_store(jobs.root / "store", fast=tier) as store:
        store.save_async(1, state_of(1)).durable()
        for step, is_killed in ((2, True), (10, False)):
            store.save(step, state_of(step))
            arguments = [sys.executable, "-c", READER, str(jobs.root / "store"), str(jobs.disk("a"))]
            reader = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            assert reader.stdout.readline() == "reads\n"
            settle(store)
            (read,) = jobs.attempts("a")
            store.save(step + 1, state_of(step + 1))
            store.save(step + 2, state_of(step + 2))
            settle(store)
            assert jobs.attempts("a") == [read, jobs.attempts("a")[-1]]
            assert (read / "fast.json").is_file()
            if is_killed:
                os.kill(reader.pid, signal.SIGKILL)
            reader.communicate("")
            store.save(step + 3, state_of(step + 3))
            settle(store)
            assert len(jobs.attempts("a")) == 1


def test_health_tells_what_the_store_lacks_whatever_the_reason(jobs: Jobs) -> None:
    """A checkpoint that a job went on from, one whose drain failed, and neither once a newer one is durable."""
    tier = FastTier(jobs.disk("a"), node="a", keep=9, drain=KeepEvery(steps=1000))
    with open_store(jobs.root / "store", fast=tier) as store:
        store.save_async(1, state_of(1)).durable()
        store.save(2, state_of(2))
        store._deadline.set(0.0)
    with open_store(jobs.root / "store", fast=tier) as store:
        store.resume(state_of(-1))
        health = store.health()
        assert (health.fast_step, health.durable_step, health.error) == (2, None, None)
        assert health.not_durable_seconds == health.fast_age_seconds is not None
        store.save_async(3, state_of(3)).durable()
        health = store.health()
        assert (health.fast_step, health.durable_step, health.not_durable_seconds) == (3, 3, None)
        lost = store.save_async(4, state_of(4))
        lost.result()
        flip(data := next(jobs.attempts("a")[-1].glob("*.distcp")))
        with pytest.raises(CheckpointDamaged):
            lost.durable()
        with pytest.raises(CheckpointDamaged):
            store.drain()
        assert not store.finish_by(0.0)
        health = store.health()
        assert (health.fast_step, health.durable_step, health.draining) == (4, 3, None)
        assert health.not_durable_seconds is not None, "nothing drains, and the store lacks step 4"
        assert data.name in str(health.error)
        store.save_async(5, state_of(5)).durable()
        drained = store.drain()
        assert (drained.step, drained.is_durable, store.finish_by(0.0)) == (5, True, True)
        health = store.health()
        assert (health.durable_step, health.not_durable_seconds, health.error) == (5, None, None)
    with open_store(jobs.root / "store") as store:
        store.resume(state_of(-1))
        assert store.health().durable_step == 5
