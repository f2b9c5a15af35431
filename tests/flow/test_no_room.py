"""A trash that somebody else, or a quota that no disk tells of, would keep for ever."""

from __future__ import annotations

import errno
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from fast_jobs import Jobs, durable
from outcomes import end_of
from small_disks import mounted
from thread_ranks import run_threads
from trees import make_tree, steps

from ckptstore import CheckpointStore, KeepLatest, StorageFull, open_store
from ckptstore.errors import AccessDenied, StorageUnavailable
from ckptstore.storage.disk import posix
from ckptstore.testing import Call, with_faults

MIB = 1 << 20


def test_a_stale_lease_that_stays_keeps_nothing(tmp_path: Path) -> None:
    """One of another user, in a directory of his own."""
    with open_store(tmp_path, grace_seconds=0) as store:
        for step in (1, 2):
            store.save(step, {"n": step})
        store.retain(KeepLatest(1))
    lease = tmp_path / "leases/0000000002-somebody.json"
    lease.parent.mkdir(exist_ok=True)
    lease.write_text("{}")
    os.utime(lease, (0, 0))

    def hook(call: Call) -> None:
        if call.verb == "delete" and call.phase == "before" and str(call.key).startswith("leases/"):
            raise AccessDenied("the directory is of another user")

    with with_faults(open_store(tmp_path, grace_seconds=0), hook) as store:
        assert [item.step for item in store.trash()] == [1]
        assert [item.step for item in store.prune()] == [1]
    assert lease.exists()


def test_a_quota_that_was_reached_is_kept_by_the_next_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the write says so, and only a commit prunes."""
    write_at = posix.write_at

    def limited(descriptor: int, views: Any, offset: int) -> Any:
        if offset >= MIB:  # of a shard: nobody deletes one while a rank writes
            files = (tmp_path / "checkpoints").rglob("*.distcp")
            if sum(file.stat().st_size for file in files) >= 3.5 * MIB:
                raise OSError(errno.EDQUOT, "Disk quota exceeded")
        return write_at(descriptor, views, offset)

    monkeypatch.setattr(posix, "write_at", limited)

    def flow(store: CheckpointStore, rank: int) -> list[str]:
        large = {"w": torch.full((MIB // 4,), 1.0)} if rank == 1 else {}
        return [type(end_of(lambda step=step: store.save(step, {"n": step, **large}))).__name__ for step in range(8)]

    ends, others = run_threads(2, tmp_path, flow, retention=KeepLatest(1), grace_seconds=3600)
    assert ends == others
    assert {*ends} == {"Checkpoint", "StorageFull"}
    assert "StorageFull StorageFull" not in " ".join(ends)
    with open_store(tmp_path) as store:
        assert len(steps(store)) == 1


def test_a_quota_that_shows_when_a_file_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As NFS has it: of many small files too, it is StorageFull, and room is made."""
    close, source = os.close, make_tree(tmp_path / "source", {f"f{number}": b"x" * 100 for number in range(50)})

    def limited(descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        close(descriptor)
        if "step-0000000002" in path and "f" in os.path.basename(path):
            raise OSError(errno.EDQUOT, "Disk quota exceeded")

    with open_store(tmp_path / "store") as store:
        store.save_directory(1, source)
        monkeypatch.setattr(os, "close", limited)
        with pytest.raises(StorageFull, match="quota") as failed:
            store.save_directory(2, source)
        monkeypatch.undo()
        assert failed.value.committed is False
        assert [checkpoint.step for checkpoint in store] == [1]


def test_a_file_system_that_reports_no_size_has_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_store(tmp_path, retention=KeepLatest(1)) as store:
        for step in range(3):
            store.save(step, {"n": step})
        monkeypatch.setattr(os, "statvfs", lambda _path: os.statvfs_result((512, 512, 0, 0, 0, 0, 0, 0, 0, 255)))
        store.save(3, {"n": torch.ones(8)})
        assert store[3].to_directory(tmp_path.with_name("copy")).is_dir()
        assert [item.step for item in store.trash()] == [0, 1, 2]


@pytest.mark.parametrize("number", [1, 4], ids=["the claim", "the removal"])
def test_a_record_that_is_no_commit_says_nothing_of_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """It lands, with an error, and the disk does not confirm it."""
    lost = {("create", "after"), ("persist", "before")}
    monkeypatch.setenv("CKPTSTORE_RETRY_ATTEMPTS", "2")

    def hook(call: Call) -> None:
        if call.key == f"log/{number:010}.json" and (call.verb, call.phase) in lost:
            raise StorageUnavailable("the disk does not answer")

    with with_faults(open_store(tmp_path, retention=KeepLatest(1)), hook) as store:
        for step in (1, 2) if number > 1 else ():
            store.save(step, {"n": step})
        monkeypatch.setattr(posix, "free_bytes", lambda _path: 0)
        with pytest.raises(StorageUnavailable, match="does not answer") as caught:
            store.save(3, {"n": torch.ones(8)})
        assert caught.value.committed is False
        assert 3 not in store


def test_a_drain_makes_room_and_is_tried_once_more(jobs: Jobs) -> None:
    """Nothing else would, for only a commit prunes: no later one would come into the store either."""
    refused = list[str]()
    jobs.options = {"retention": KeepLatest(1)}

    def hook(call: Call) -> None:
        is_file = call.phase == "before" and call.verb.startswith("write") and "rank=00001-00.distcp" in call.key
        is_full = len([*jobs.root.glob("store/checkpoints/*/ckptstore.json")]) > 1
        if is_file and (is_full or "step-0000000009" in call.key):
            refused.append(call.key[12:27])
            raise StorageFull("Disk quota exceeded")

    def flow(store: CheckpointStore, rank: int) -> list[str]:
        ends = [end_of(lambda step=step: durable(step)(store, rank)) for step in (1, 2, 3, 9, 10)]
        return [type(end).__name__ for end in ends]

    assert jobs.drain("ab", flow, hook=hook) == [["NoneType"] * 3 + ["StorageFull", "NoneType"]] * 2
    assert Counter(refused) == {"step-0000000003": 1, "step-0000000009": 2}


def test_a_file_system_without_inodes_says_so(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "8m,nr_inodes=40") as disk, open_store(disk / "run", group="solo") as store:
        ends = [end_of(lambda step=step: store.save(step, {"epoch": step})) for step in range(40)]
    first = next(end for end in ends if isinstance(end, Exception))
    assert isinstance(first, StorageFull)
    assert "but no inodes: the file system takes no more files" in str(first)
