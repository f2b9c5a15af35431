"""Where Ray keeps: what is committed when answers get lost, and who deletes. The ranks are threads; no cluster."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from storing import make_run, store

from ckptstore import Checkpoint
from ckptstore.errors import CkptstoreError, StorageFull, StorageUnavailable
from ckptstore.integrations.ray.kept_by_ray.ray_keeps import RayAttempt
from ckptstore.testing import Call, Hook

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _two_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTSTORE_RETRY_ATTEMPTS", "2")
    monkeypatch.setenv("CKPTSTORE_RETRY_WAIT_INITIAL_SECONDS", "0.01")


def all_store(tmp_path: Path, hook_of: Callable[[int], Hook], **more: Any) -> list[Any]:
    """What two ranks get that store a directory of one file each, with a hook around all that a rank asks for."""
    make_run(str(tmp_path / "run"))
    sources = [tmp_path / f"source-{rank}" for rank in range(2)]
    for source in sources:
        source.mkdir(exist_ok=True)
        (source / "model.bin").write_bytes(os.urandom(1000))
    return store(str(tmp_path / "run"), sources, name="checkpoint_7", hook_of=hook_of, **more)


def test_what_ray_keeps_has_timings_too(tmp_path: Path) -> None:
    first, _ = all_store(tmp_path, lambda rank: lambda call: None)
    assert isinstance(first, RayAttempt)
    timings = Checkpoint.from_directory(tmp_path / "run" / first.directory).timings
    assert timings is not None
    assert [(one.rank, one.size_bytes, one.requests) for one in timings.ranks] == [(0, 1000, 1), (1, 1000, 1)]
    assert set(timings.phases) == {"agree", "upload", "wait", "commit"}


def test_a_rank_that_hears_nothing_finds_the_manifest(tmp_path: Path) -> None:
    def hook_of(rank: int) -> Hook:
        is_cut_off = False

        def hook(call: Call) -> None:
            nonlocal is_cut_off
            is_receipt = call.verb == "create" and re.search(r"/[0-9a-f]{16}\..*\.00001$", call.key)
            is_cut_off |= rank == 1 and bool(is_receipt) and call.phase == "after"
            if is_cut_off and call.key.startswith("group/"):
                until = time.monotonic() + 60  # the leader needs nothing more of this rank
                while not [*tmp_path.glob("run/*/ckptstore.json")] and time.monotonic() < until:
                    time.sleep(0.01)
                raise StorageUnavailable("the network is gone")
            assert not (rank == 1 and call.verb == "delete"), f"a follower deletes {call.key}"

        return hook

    leader, follower = all_store(tmp_path, hook_of)
    assert isinstance(leader, RayAttempt)
    assert follower == leader
    assert Checkpoint.from_directory(tmp_path / "run" / leader.directory).verify().ok


@pytest.mark.parametrize("effect", ["after", "before"])
def test_a_manifest_whose_reply_is_lost_is_looked_for(tmp_path: Path, effect: str) -> None:
    failed: list[str] = []

    def hook(call: Call) -> None:
        if call.verb == "create" and call.key.endswith("/ckptstore.json") and call.phase == effect:
            failed.append(call.key)
            raise StorageUnavailable("lost")

    ends = all_store(tmp_path, lambda rank: hook)
    assert failed
    if effect == "after":
        assert isinstance(ends[0], RayAttempt)
        assert ends[1] == ends[0]
        assert Checkpoint.from_directory(tmp_path / "run" / ends[0].directory).verify().ok
    else:  # it may still arrive: nothing is deleted
        assert [end.committed for end in ends if isinstance(end, CkptstoreError)] == [None, None]
        assert len([*tmp_path.glob("run/checkpoint_7-*/*")]) == 2


def test_what_lies_beside_is_there_before_the_manifest(tmp_path: Path) -> None:
    deleted: list[int] = []

    def hook_of(rank: int) -> Hook:
        def hook(call: Call) -> None:
            if call.verb == "write" and call.key.endswith(".metadata.json"):
                raise StorageFull("no space")
            if call.verb == "delete" and call.key.startswith("checkpoint_7") and call.phase == "before":
                deleted.append(rank)

        return hook

    ends: list[Any] = all_store(tmp_path, hook_of, beside={".metadata.json": b"{}"})
    assert [(type(end), end.committed) for end in ends] == [(StorageFull, False)] * 2
    assert set(deleted) == {0}
    assert not [*tmp_path.glob("run/checkpoint_7*")]


def test_what_a_failed_attempt_writes_late_changes_no_checkpoint_of_its_name(tmp_path: Path) -> None:
    late: list[str] = []

    def hook_of(rank: int) -> Hook:
        def hook(call: Call) -> None:
            if rank == 1 and call.key.endswith(".bin") and call.phase == "before":
                late.append(call.key)
                raise StorageUnavailable("no answer")

        return hook

    failed = all_store(tmp_path, hook_of)
    assert [end.committed for end in failed if isinstance(end, CkptstoreError)] == [False, False]
    leader, _ = all_store(tmp_path, lambda rank: lambda call: None)
    assert isinstance(leader, RayAttempt)
    for key in {*late}:
        (tmp_path / "run" / key).parent.mkdir(exist_ok=True)
        (tmp_path / "run" / key).write_bytes(b"late")
    assert late
    assert Checkpoint.from_directory(tmp_path / "run" / leader.directory).verify().ok
