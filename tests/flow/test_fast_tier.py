"""Fast checkpoints: saved to the disks of nodes, found again, and never more than what is true of them.

Ranks are threads, nodes are directories with names; the rest is real, the connections between nodes too.
"""

from __future__ import annotations

import os
import pickle
import shutil
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch
from uuid import uuid4

import pytest
import torch
from fast_jobs import NO_DRAIN, SIZE, Flow, Jobs, of, resume, save, settle, state_of, steps
from thread_ranks import in_threads
from trees import flip, heard

from ckptstore import (
    CheckpointStore,
    FastTier,
    KeepEvery,
    KeepLatest,
    KeepWeights,
    KeepWithin,
    StorageGroup,
    errors,
    open_store,
)
from ckptstore.events import CheckpointResumed, FastBypassed, FastCommitted, SavePhase
from ckptstore.extensions.tier.publisher import FastPublisher
from ckptstore.testing.s3_server import s3_server

FULL = errors.StorageFull("no space on the disk")


def test_a_job_goes_on_from_the_disks_of_its_nodes(jobs: Jobs, skipped: list[str]) -> None:
    assert jobs.run("aabb", resume) == [None] * 4
    for found in jobs.run("aabb", save(1, 2, 3)):
        assert (found.step, found.number, found.is_durable, found.world_size) == (3, None, False, 4)
    for node in "ab":
        assert steps(jobs, node)[-2:] == [2, 3]  # the first may be on its way into the store
        assert all((path / "fast.json").is_file() for path in jobs.attempts(node))
    assert jobs.run("aabb", resume) == of(3, 0, 1, 2, 3)
    assert jobs.run("baba", resume) == of(3, 0, 1, 2, 3)
    assert skipped == []
    with open_store(jobs.root / "store") as store:  # for who has no tier nothing is there
        assert store.latest() is None


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize(
    ("saved", "resumed"), [("aabb", "ab"), ("ab", "abb"), ("ab", "a"), ("aab", "bbaa"), ("aaAb", "bA")]
)
def test_another_number_of_ranks(jobs: Jobs, saved: str, resumed: str, copies: int) -> None:
    jobs.run(saved, save(1, 2), copies=copies)
    expected = of(2, *[0] * len(resumed))
    if set(resumed) != set(saved) and copies == 1:
        assert jobs.run(resumed, resume) == [None] * len(resumed)
    else:
        assert jobs.run(resumed, resume) == expected


@pytest.mark.parametrize("lost", "ab")
def test_a_lost_node(jobs: Jobs, skipped: list[str], lost: str) -> None:
    jobs.run("ab", save(1, 2), copies=2)
    shutil.rmtree(jobs.disk(lost))
    assert jobs.run("ab", resume, copies=2) == of(2, 0, 1)
    assert jobs.run("ab", lambda store, rank: (resume(store, rank), save(3)(store, rank))[0], copies=2) == of(2, 0, 1)
    assert len(jobs.attempts(lost)) == 1
    shutil.rmtree(jobs.disk("ba"["ab".index(lost)]))
    assert jobs.run("ab", resume) == of(3, 0, 1)
    assert skipped == []


def test_timings_survive_an_error_after_the_commit(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that finds the certificate after an error in that meeting knows the slowest rank all the same."""
    certified = FastPublisher._certified

    def fails_late(*given: Any) -> Any:
        certified(*given)
        raise errors.StorageError("the answer is lost", committed=None)

    monkeypatch.setattr(FastPublisher, "_certified", fails_late)
    with heard(FastCommitted) as committed, heard(SavePhase) as phases:
        assert [found.step for found in jobs.run("ab", save(1))] == [1, 1]
    (slowest,) = {event.slowest_rank for event in committed}
    assert slowest is not None
    assert sorted(event.rank for event in phases if event.phase == "commit") == [0, 1]


def test_no_request_is_made_until_a_save_is_complete(tmp_path: Path) -> None:
    with s3_server(buckets=["test"]) as server:
        jobs = Jobs(tmp_path, "s3://test/run", {"storage_options": server.storage_options})

        def flow(store: CheckpointStore, rank: int) -> int:
            store.save(1, state_of(1))
            store.drain()  # which later ones are not due for
            store._job._pruning.join()
            before = len(server.log)
            save(2, 3)(store, rank)
            store.save_async(4, state_of(4)).result()
            pending = store.save_async(5, state_of(5))
            assert pending.result() is not None
            count = len(server.log) - before
            checkpoint = pending.durable()
            assert (checkpoint.step, checkpoint.is_durable, checkpoint.verify().ok) == (5, True, True)
            return count

        with jobs.open(0, "a", uuid4().hex, drain=KeepEvery(steps=100)) as store:
            assert flow(store, 0) == 0
        assert jobs.run("a", resume) == of(5, 0)


def zombies(jobs: Jobs, nodes: str, **tier: Any) -> Callable[[Flow], list[Any]]:
    """A job that goes on after another one has taken the store: what a flow gives on all of its ranks."""
    token = uuid4().hex
    stores = [jobs.open(rank, nodes, token, **NO_DRAIN, **tier) for rank in range(len(nodes))]
    for store in stores:
        store._deadline.set(0.0)
    return lambda flow: in_threads(len(nodes), lambda rank: flow(stores[rank], rank))


def close(store: CheckpointStore, _rank: int) -> None:
    store.close()


def test_a_zombie_on_the_same_nodes_is_fenced_without_a_request(jobs: Jobs) -> None:
    on_all = zombies(jobs, "ab")
    on_all(save(1, 2))
    assert jobs.run("ab", resume) == of(2, 0, 1)
    found = on_all(save(7))
    assert [type(error) for error in found] == [errors.StoreFenced] * 2
    on_all(close)
    assert jobs.run("ab", resume) == of(2, 0, 1)


@pytest.mark.parametrize("copies", [1, 2])
def test_what_a_zombie_saves_on_other_nodes_is_void(jobs: Jobs, skipped: list[str], copies: int) -> None:
    """It has not heard of the other job, which has come to no disk of its."""
    on_all = zombies(jobs, "ab", copies=copies)
    on_all(save(1, 2))
    assert jobs.run("cd", resume, copies=copies) == [None, None]
    assert [found.step for found in on_all(save(7, 8))] == [8, 8]
    on_all(close)
    jobs.run("cd", save(3), copies=copies)
    assert jobs.run("abcd", resume, copies=copies) == of(3, 0, 0, 0, 0)
    assert jobs.attempts("a") == []
    assert skipped == []


@pytest.mark.parametrize(("target", "saves_on"), [(1, False), (1, True), (2, False)])
def test_a_roll_back_by_the_job_voids_what_it_saved_before(jobs: Jobs, target: int, saves_on: bool) -> None:
    def flow(store: CheckpointStore, rank: int) -> None:
        resume(store, rank)
        save(3, 4)(store, rank)
        if rank == 1:  # any rank may, and knows the number of the last save
            store.roll_back(target)
        if saves_on:
            save(2)(store, rank)

    with open_store(jobs.root / "store") as store:
        store.save(1, state_of(1))
        store.save(2, state_of(2))
    jobs.run("ab", flow)
    assert jobs.run("ab", resume) == (of(2, 0, 1) if saves_on else of(target, 0, 0))


def test_the_newest_wins_wherever_it_lies(jobs: Jobs) -> None:
    jobs.run("a", save(1, 2))
    with open_store(jobs.root / "store") as store:  # a job without a tier goes on from nothing, and saves
        store.save(5, state_of(5))
    assert jobs.run("a", resume) == of(5, 0)
    jobs.run("a", lambda store, rank: (resume(store, rank), save(6)(store, rank)))
    assert jobs.run("a", resume) == of(6, 0)


def test_fast_checkpoints_of_a_copied_store_are_not_this_ones(jobs: Jobs, skipped: list[str]) -> None:
    """Both stores have one id, and gave one epoch to different jobs."""
    with open_store(jobs.root / "store") as store:
        store.save(1, state_of(1))
    shutil.copytree(jobs.root / "store", jobs.root / "copy")
    other = Jobs(jobs.root, str(jobs.root / "copy"))
    other.run("a", save(8, 9))
    assert jobs.run("a", resume) == of(1, 0)
    assert "another history" in skipped[0]
    assert other.run("a", resume) == of(9, 0)


def test_only_what_is_superseded_goes(jobs: Jobs) -> None:
    def flow(store: CheckpointStore, rank: int) -> list[list[int]]:
        resume(store, rank)
        seen = []
        for step in (4, 5, 6):
            save(step)(store, rank)
            store.drain()
            settle(store)
            seen.append(steps(jobs, "a"))
        return seen

    jobs.options = {"retention": KeepLatest(1)}  # which is of what is in the store
    for flow_before in (save(1, 2, 3), resume):
        jobs.run("a", flow_before, keep=3)
        assert steps(jobs, "a") == [1, 2, 3]
    assert jobs.run("a", flow, keep=1, drain_bytes_per_second=None) == [[[4], [5], [6]]]


@pytest.mark.parametrize("copies", [1, 2])
def test_every_file_is_made_durable_once_before_its_checkpoint_is_certified(
    jobs: Jobs, copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_fsync, flushed, lock = os.fsync, Counter[str](), threading.Lock()

    def fsync(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if path.is_file() and not (path.parent / "fast.json").exists() and "-tmp-" not in path.name:
            with lock:
                flushed[str(path)] += 1
        real_fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    large = torch.ones(5 << 20)
    jobs.run("aab", lambda store, rank: store.save(1, {**state_of(1, rank), "large": large}), copies=copies)
    for node in "ab":
        (attempt,) = jobs.attempts(node)
        stored = {str(file) for file in attempt.iterdir() if file.name != "fast.json"}
        assert len(stored) >= (1 if copies == 1 and node == "b" else 3)
        assert {path: flushed[path] for path in stored} == dict.fromkeys(stored, 1)


def test_a_save_that_fails_leaves_nothing(jobs: Jobs) -> None:
    def flow(store: CheckpointStore, rank: int) -> Any:
        save(1)(store, rank)
        with pytest.raises(errors.CkptstoreError) as caught:
            store.save(2, {"w": torch.ones(SIZE), "x": object() if rank else 1})
        left = len(jobs.attempts("ab"[rank]))
        save(3)(store, rank)
        return type(caught.value).__name__, left

    assert jobs.run("ab", flow) == [("InvalidState", 1)] * 2
    assert jobs.run("ab", resume) == of(3, 0, 1)


@pytest.mark.usefixtures("small_disk")
@pytest.mark.parametrize("copies", [1, 2])
def test_where_a_disk_is_full_the_save_goes_to_the_store(jobs: Jobs, copies: int) -> None:
    large = torch.arange(1 << 20, dtype=torch.float32)

    def flow(store: CheckpointStore, rank: int) -> Any:
        first = save(1)(store, rank)
        second = store.save_async(2, {"w": large, "step": 2}).result()
        assert store.drain(0.0) is None, "the last save went to the store"
        third = save(3)(store, rank)
        return [first.is_durable, second.is_durable, third.is_durable]

    with heard(FastBypassed) as told:
        assert jobs.run("ab", flow, copies=copies) == [[False, True, False]] * 2
    assert {(event.step, event.rank) for event in told} == {(2, 0), (2, 1)}
    assert jobs.run("ab", resume, copies=copies) == of(3, 0, 1)
    for node in "ab":
        (jobs.attempts(node)[-1] / "fast.json").unlink()

    def resume_large(store: CheckpointStore, rank: int) -> bool:
        state = {"w": torch.zeros_like(large), "step": 0}
        found = store.resume(state)
        return found is not None and found.number is not None and torch.equal(state["w"], large)

    assert jobs.run("ab", resume_large, copies=copies) == [True, True]


@pytest.mark.parametrize(("full", "is_there"), [("a", False), ("ab", False), ("ab", True)])
def test_where_a_certificate_alone_does_not_fit_the_save_goes_to_the_store(
    jobs: Jobs, full: str, is_there: bool
) -> None:
    """Unless a node has one, or may have one."""

    def flow(store: CheckpointStore, rank: int) -> Any:
        save(1)(store, rank)
        disk = store._job.tier.open(store._job).disk
        create = disk.storage.create

        def fails(key: str, data: bytes) -> bool:
            if is_there:
                create(key, data)
            raise FULL

        with patch.object(disk.storage, "create", fails if disk.node in full else create):
            second = save(2)(store, rank)
        settle(store)
        left = steps(jobs, disk.node)
        return second.is_durable, save(3)(store, rank).is_durable, left

    is_bypassed = full == "ab" and not is_there
    assert jobs.run("ab", flow) == [(is_bypassed, False, [1] if is_bypassed else [1, 2])] * 2


def test_a_save_that_found_a_disk_full_makes_room_for_the_next(jobs: Jobs) -> None:
    """Else what somebody read, or what drained, would fill it until the job starts again."""

    def flow(store: CheckpointStore, rank: int) -> list[list[int]]:
        save(1)(store, rank)
        store.drain()
        with save(2)(store, rank)._files.held():
            save(3)(store, rank)
            settle(store)
            before = steps(jobs, "a")
        with patch.object(store._job.tier.place.transfer, "upload", side_effect=FULL):
            assert save(4)(store, rank).is_durable
        settle(store)
        return [before, steps(jobs, "a")]

    tier = {"keep": 1, "drain": KeepEvery(steps=1000), "drain_bytes_per_second": None}
    assert jobs.run("a", flow, **tier) == [[[2, 3], [3]]]


def test_where_a_disk_is_full_and_another_rank_has_no_copy_both_are_told(jobs: Jobs) -> None:
    def flow(store: CheckpointStore, rank: int) -> Any:
        save(1)(store, rank)
        no_memory = patch.object(store._state_saver, "_staging_memory", side_effect=errors.InvalidState("no memory"))
        full = patch.object(store._job.tier.place.transfer, "upload", side_effect=FULL)
        with no_memory if rank else full:
            return store.save_async(2, state_of(2, rank)).result()

    for error in jobs.run("ab", flow):
        assert (type(error), error.rank, error.step) == (errors.InvalidState, 1, 2)
    assert jobs.run("ab", resume) == of(1, 0, 1)


def test_a_checkpoint_on_one_node_can_be_used_as_any_other(jobs: Jobs, tmp_path: Path) -> None:
    def flow(store: CheckpointStore, rank: int) -> None:
        found = store.save(4, state_of(4), metrics={"loss": 0.5}, metadata={"note": "x"})
        assert (found.metrics, found.metadata) == ({"loss": 0.5}, {"note": "x"})
        assert found.verify().ok
        with found.as_directory() as path:
            assert {"fast.json", "tensors.index"} <= {file.name for file in path.iterdir()}
        state = state_of(0)
        found.load(state)
        assert state["step"] == 4
        with pytest.raises(errors.InvalidMetadata, match="durable"):
            found.set_metadata({})
        with pytest.raises(errors.InvalidInput, match="another process"):
            pickle.dumps(found)

    assert jobs.run("a", flow) == [None]


def test_a_resume_without_a_state_gives_what_can_be_loaded(jobs: Jobs) -> None:
    jobs.run("ab", save(1, 2))

    def flow(store: CheckpointStore, rank: int) -> Any:
        found = store.resume()
        state = state_of(0)
        found.load(state)
        with found.as_directory() as path:  # a copy, since this node does not have all
            names = sorted(file.name for file in path.iterdir() if file.suffix == ".distcp")
        return found.step, found.number, float(state["own"][0]), len(names)

    with heard(CheckpointResumed) as resumed:
        assert jobs.run("ab", flow) == [(2, None, 200.0, 2), (2, None, 201.0, 2)]
    assert {(event.step, event.number) for event in resumed} == {(2, None)}


def test_a_step_that_is_there_is_refused_where_that_is_asked(jobs: Jobs) -> None:
    def flow(store: CheckpointStore, rank: int) -> None:
        save(1)(store, rank)
        with pytest.raises(errors.StepExists):
            store.save(1, state_of(1), exists="error")
        store.save(2, state_of(2), exists="error")

    assert jobs.run("ab", flow) == [None, None]


def test_ranks_that_do_not_fit_together_are_refused(jobs: Jobs) -> None:
    token = uuid4().hex

    def run(paths: list[str], keeps: list[int], nodes: str = "aa", **more: Any) -> list[Any]:
        def rank(number: int) -> Any:
            tier = FastTier(jobs.root / paths[number], node=nodes[number], keep=keeps[number], **more)
            group = StorageGroup(number, 2, f"{token}{paths[1]}{nodes}{len(more)}")
            with open_store(jobs.root / "store", group=group, fast=tier) as store:
                return save(1)(store, number)

        return in_threads(2, rank)

    assert ["different directories" in str(error) for error in run(["one", "two"], [2, 2])] == [True, True]
    assert ["Only path and node may differ" in str(error) for error in run(["one", "one"], [2, 3])] == [True, True]
    assert ["copies=2 needs two nodes" in str(error) for error in run(["new", "new"], [2, 2], copies=2)] == [True, True]
    assert not (jobs.root / "new").exists(), "it is refused before anything is written"
    found = run(["one", "one"], [2, 2], "ab", copies=2)  # two pods with one directory of their machine
    assert ["a and b have one directory" in str(error) for error in found] == [True, True]
    assert [checkpoint.step for checkpoint in run(["one", "one"], [2, 2], "ab")] == [1, 1]


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"path": ""}, "path"),
        ({"path": 3}, "path"),
        ({"copies": 3}, "copies"),
        ({"keep": 0}, "keep"),
        ({"keep": True}, "keep"),
        ({"drain": 1000}, "drain"),
        ({"drain": KeepEvery(seconds=60)}, "compares no times"),
        ({"drain": KeepWeights(KeepEvery(steps=10))}, "drops no keys"),
        ({"drain": KeepEvery(steps=10) & KeepWithin("1TB")}, "no sizes"),
        ({"drain_bytes_per_second": 0}, "drain_bytes_per_second"),
        ({"drain_bytes_per_second": True}, "drain_bytes_per_second"),
        ({"node": "a/b"}, "name of a node"),
    ],
)
def test_bad_input(given: dict[str, Any], match: str) -> None:
    with pytest.raises(errors.InvalidInput, match=match):
        FastTier(**{"path": "/a", **given})


def test_what_a_fast_checkpoint_cannot_be(jobs: Jobs) -> None:
    with pytest.raises(errors.InvalidInput, match="it is a FastTier"):
        open_store(jobs.root / "store", fast="/a")
    with jobs.open(0, "a", uuid4().hex) as store, pytest.raises(errors.InvalidInput, match="incremental"):
        store.save(1, state_of(1), incremental=True)


@pytest.mark.parametrize("how", ["open", "link", "file"])
def test_a_directory_that_is_not_safe_is_refused(jobs: Jobs, how: str) -> None:
    disk = jobs.disk("a")
    if how == "open":
        disk.mkdir()
        disk.chmod(0o755)
    elif how == "link":
        (jobs.root / "elsewhere").mkdir(mode=0o700)
        disk.symlink_to(jobs.root / "elsewhere")
    else:
        disk.write_text("")
    (error,) = jobs.run("a", save(1))
    assert isinstance(error, errors.InvalidInput | errors.StorageError)
    assert "disk-a" in str(error)


def test_when_nothing_whole_is_left_the_reasons_are_told(jobs: Jobs) -> None:
    jobs.run("a", save(1))
    flip(next(jobs.attempts("a")[0].glob("*.distcp")))
    (error,) = jobs.run("a", resume)
    assert isinstance(error, errors.NoUsableCheckpoint)
    assert "step 1" in str(error)
