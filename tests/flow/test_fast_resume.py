"""What a resume from the disks of nodes does when they, the store or the job fail."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch
from fast_jobs import Jobs, durable, of, resume, save, state_of, steps
from thread_ranks import in_threads
from trees import flip, heard

from ckptstore import CheckpointStore, FastTier, StorageError, StorageGroup, open_store
from ckptstore.errors import InvalidInput, StateMismatch, StorageUnavailable, StoreFenced
from ckptstore.events import LoadEnded
from ckptstore.extensions.tier.nodes.node_server import NodeClient
from ckptstore.group.message import Message
from ckptstore.testing import FailAt, with_faults, wrap
from ckptstore.testing.s3_server import s3_server
from ckptstore.transfer import Transfer

pytestmark = pytest.mark.slow


def test_what_was_damaged_takes_no_place_of_what_can_be_used(jobs: Jobs, skipped: list[str]) -> None:
    jobs.run("ab", save(1, 2, 3))
    flip(jobs.attempts("a")[-1] / "state-rank=00000-00.distcp")

    def flow(store: CheckpointStore, rank: int) -> Any:
        found = resume(store, rank)
        is_left = 3 in steps(jobs, "ab"[rank])
        save(4)(store, rank)
        return found, is_left, steps(jobs, "ab"[rank])[-2:]

    assert jobs.run("ab", flow) == [(of(2, rank)[0], False, [2, 4]) for rank in range(2)]
    assert any("damaged" in reason for reason in skipped)


@pytest.mark.parametrize("is_damaged", [False, True])
def test_each_load_reads_the_own_disk_first_and_the_other_copy_where_that_is_damaged(
    jobs: Jobs, caplog: pytest.LogCaptureFixture, is_damaged: bool
) -> None:
    jobs.run("abc", save(1), copies=2)
    if is_damaged:
        flip(jobs.attempts("a")[-1] / "state-rank=00000-00.distcp")

    def flow(store: CheckpointStore, rank: int) -> float:
        found, state = store.resume(), state_of(0, rank)
        for _ in range(3):
            found.load(state)
        assert state["w"].eq(1).all()
        return float(state["own"][0])

    with caplog.at_level(logging.WARNING, "ckptstore"):
        assert jobs.run("abc", flow, copies=2) == [100.0, 101.0, 102.0]
    assert ("is read from" in caplog.text) == is_damaged


def test_a_certificate_goes_only_to_nodes_that_do_not_have_it(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has a line for each file of each rank. What all ranks hear of it does not grow with it."""
    jobs.run("abc", save(1, 2), copies=2)
    shutil.rmtree(jobs.disk("a"))
    heard: list[str] = []
    sent: list[str] = []
    decode, read_into = Message.decode, NodeClient.read_into

    def listen(data: bytes) -> Message | None:
        heard.append(repr(data))
        return decode(data)

    def read(client: NodeClient, attempt: Any, name: str, *args: Any) -> None:
        if name == "fast.json":
            sent.append(str(attempt))
        read_into(client, attempt, name, *args)

    monkeypatch.setattr(Message, "decode", listen)
    monkeypatch.setattr(NodeClient, "read_into", read)
    assert jobs.run("abc", resume, copies=2) == of(2, 0, 1, 2)
    assert heard
    assert not any("digest" in text for text in heard)
    assert len(sent) == len(set(sent)) == 2, "once each: the leader is on the new node"


@pytest.mark.parametrize("copies", [1, 2])
def test_a_disk_that_cannot_read_is_as_good_as_damage(jobs: Jobs, skipped: list[str], copies: int) -> None:
    jobs.run("ab", save(1, 2), copies=copies)
    broken = f"read* *{jobs.attempts('a')[-1].name}*distcp"

    def flow(store: CheckpointStore, rank: int) -> Any:
        job = store._job
        place = job.tier.open(job)
        if rank == 0:
            storage = wrap(place.disk.storage, FailAt(broken, StorageError("Input/output error"), times=None))
            place.disk.storage = storage
            place.transfer = Transfer(storage, config=job.config.transfer, retry=job.config.retry)
        return resume(store, rank)

    assert jobs.run("ab", flow, copies=copies) == of(copies, 0, 1)
    assert "Input/output error" in skipped[0]


def test_a_shortage_of_open_files_costs_no_checkpoint(
    jobs: Jobs, skipped: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs.run("ab", save(1, 2))
    monkeypatch.setenv("CKPTSTORE_RETRY_ATTEMPTS", "1")
    opened = os.open

    def refuses(path: Any, *args: Any, **more: Any) -> int:
        if "step-0000000002" in os.fspath(path) and os.fspath(path).endswith("rank=00000-00.distcp"):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return opened(path, *args, **more)

    with monkeypatch.context() as here:
        here.setattr(os, "open", refuses)
        assert [type(error) for error in jobs.run("ab", resume)] == [StorageUnavailable] * 2
    assert skipped == []
    assert jobs.run("ab", resume) == of(2, 0, 1)


def test_a_claim_that_cannot_be_asked_for_now_refuses_nothing(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a moment without the store would cost the newest checkpoint for good."""
    with open_store(jobs.root / "store") as store:
        store.save(1, state_of(1))
    jobs.run("a", save(7))
    with open_store(jobs.root / "store") as store:
        for _ in range(70):  # behind that of the job, else the claim is among those that every resume reads
            store.annotate(1, {"score": 0.5})
    monkeypatch.setenv("CKPTSTORE_RETRY_ATTEMPTS", "2")
    claim = FailAt("read log/0000000003.json", StorageUnavailable("not now"), times=None)
    store = jobs.open(0, "a", uuid4().hex)
    with with_faults(store, claim) as faulty, pytest.raises(StorageUnavailable, match="not now"):
        resume(faulty, 0)
    assert claim.struck
    assert jobs.run("a", resume) == of(7, 0)


def test_a_job_resumes_on_a_full_disk(jobs: Jobs, small_disk: Path) -> None:
    jobs.run("ab", save(1, 2))
    with open(small_disk / "somebody-elses", "wb", buffering=0) as file:
        while shutil.disk_usage(small_disk).free:
            file.write(b"x" * 4096)
    assert jobs.run("ab", resume) == of(2, 0, 1)


def test_no_payload_comes_from_the_store_that_a_node_has(jobs: Jobs) -> None:
    with s3_server(buckets=["test"]) as server:
        jobs.uri, jobs.options = "s3://test/run", {"storage_options": server.storage_options}
        fast = {"drain_bytes_per_second": None}
        jobs.run("ab", durable(1), **fast)

        def read() -> set[str]:
            before = len(server.log)
            assert jobs.run("ab", resume) == of(1, 0, 1)
            asked = [str(request) for request in server.log[before:]]
            return {name for name in ("ckptstore.json", "distcp", "index") if any(name in one for one in asked)}

        assert read() == set()
        (jobs.attempts("b")[-1] / "state-rank=00001-00.distcp").unlink()
        assert read() == {"distcp"}
        shutil.rmtree(jobs.disk("b"))
        shutil.rmtree(jobs.disk("a"))
        assert read() == {"ckptstore.json", "distcp"}  # the node cache has the index


def test_a_durable_one_that_is_damaged_on_its_node_comes_from_the_store(jobs: Jobs, skipped: list[str]) -> None:
    """Of different files each copy has what the other lacks; of one file only the store is left."""
    jobs.run("ab", durable(1, 2), copies=2, drain_bytes_per_second=None)
    for node, name in (("a", "state-rank=00000-00"), ("b", "state-rank=00001-00"), ("b", "state-rank=00000-00")):
        flip(jobs.attempts(node)[-1] / f"{name}.distcp")
        assert jobs.run("ab", resume, copies=2) == of(2, 0, 1)
    jobs.run("a", durable(3), drain_bytes_per_second=None)
    flip(jobs.attempts("a")[-1] / "tensors.index")
    assert jobs.run("a", resume) == of(3, 0)


def test_a_rank_without_a_tier_is_told(jobs: Jobs) -> None:
    token = uuid4().hex

    def rank(number: int) -> Any:
        fast = FastTier(jobs.disk("a"), node="a") if number else None
        group = StorageGroup(number, 2, token)
        with open_store(jobs.root / "store", group=group, fast=fast, rank_timeout_seconds=20) as store:
            return resume(store, number)

    first, second = in_threads(2, rank)
    assert type(first) is type(second) is InvalidInput
    assert str(first) == str(second)


def test_a_state_that_does_not_fit_changes_nothing(jobs: Jobs) -> None:
    jobs.run("ab", save(1, 2))

    def flow(store: CheckpointStore, rank: int) -> list[list[int]]:
        with pytest.raises(StateMismatch):
            store.resume({"w": torch.zeros(3)})
        return [steps(jobs, node) for node in "ab"]

    assert jobs.run("ab", flow) == [[[1, 2]] * 2] * 2
    assert jobs.run("ab", resume) == of(2, 0, 1)


def test_a_job_resumes_from_its_own_saves(jobs: Jobs) -> None:
    def flow(store: CheckpointStore, rank: int) -> list[Any]:
        save(1, 2)(store, rank)
        found = [resume(store, rank)]
        save(3)(store, rank)
        found.append(resume(store, rank))
        store.save_async(4, state_of(4, rank))
        return [*found, resume(store, rank)]

    assert jobs.run("ab", flow) == [[of(step, rank)[0] for step in (2, 3, 4)] for rank in range(2)]
    assert jobs.run("ab", resume) == of(4, 0, 1)


def test_a_resume_without_a_state_reports_its_search(jobs: Jobs) -> None:
    """The event counts the requests of the search too, and a search that fails has its event."""
    jobs.run("a", save(1))
    failed = FailAt("read log/*", StorageError("not now"), times=None)
    with heard(LoadEnded) as ended:
        with with_faults(jobs.open(0, "a", uuid4().hex), failed) as faulty, pytest.raises(StorageError):
            faulty.resume()
        with jobs.open(0, "a", uuid4().hex) as store:
            assert store.resume() is not None
    assert [(event.error_type, event.step) for event in ended] == [("StorageError", None), (None, 1)]
    assert 0 < ended[0].requests < ended[1].requests


def test_two_jobs_that_start_at_once_take_the_same_or_are_fenced(jobs: Jobs) -> None:
    jobs.run("ab", save(1, 2), copies=2)
    for _ in range(2):
        both = in_threads(2, lambda _: jobs.run("ab", resume, copies=2))
        assert of(2, 0, 1) in both
        for found in both:
            assert found == of(2, 0, 1) or [type(error) for error in found] == [StoreFenced] * 2
    assert jobs.run("ab", resume, copies=2) == of(2, 0, 1)
