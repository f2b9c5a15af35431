"""A trash that somebody else, or a quota that no disk tells of, would keep for ever."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from trees import steps

from ckptstore import KeepLatest, StorageFull, StorageGroup, open_store
from ckptstore.errors import AccessDenied, CkptstoreError
from ckptstore.storage.disk import posix
from ckptstore.testing import Call, with_faults
from ckptstore.upkeep.retain import retain

MIB = 1 << 20


def test_a_stale_lease_that_stays_keeps_nothing(tmp_path: Path) -> None:
    """One of another user, in a directory of his own."""
    with open_store(tmp_path, grace_seconds=0) as store:
        for step in (1, 2):
            store.save(step, {"n": step})
        retain(store._job.log, KeepLatest(1))
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
        used_bytes = sum(file.stat().st_size for file in (tmp_path / "checkpoints").rglob("*.distcp"))
        if offset >= MIB and used_bytes >= 3.5 * MIB:
            raise OSError(errno.EDQUOT, "Disk quota exceeded")
        return write_at(descriptor, views, offset)

    monkeypatch.setattr(posix, "write_at", limited)
    ends: list[list[str]] = [[], []]

    def run(rank: int) -> None:
        group = StorageGroup(rank, 2, "one")
        with open_store(tmp_path, group=group, retention=KeepLatest(1), grace_seconds=3600) as store:
            for step in range(8):
                state = {"w": torch.full((MIB // 4,), float(step))} if rank == 1 else {"n": step}
                try:
                    store.save(step, state)
                    ends[rank].append("saved")
                except StorageFull:
                    ends[rank].append("full")
                except CkptstoreError as error:
                    ends[rank].append(repr(error))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ends[0] == ends[1]
    assert {*ends[0]} == {"saved", "full"}
    assert "full full" not in " ".join(ends[0])
    with open_store(tmp_path) as store:
        assert len(steps(store)) == 1
