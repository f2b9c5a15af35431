"""No clock of a machine takes a lease away from a living reader, and a dead one's lease goes in the end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ckptstore import CheckpointStore, open_store
from ckptstore.storage.open import open_storage
from ckptstore.tools.report.condition import _leases
from ckptstore.upkeep import leases

pytestmark = pytest.mark.slow

DAY_SECONDS = 86_400
READER = """
import os, sys, time
from ckptstore import open_store
from ckptstore.upkeep import leases
with open_store(sys.argv[1]) as store, leases.hold(store._job.storage, store[1].number):
    if os.fork() == 0:
        time.sleep(600)  # a child that is no reader, and outlives it
    print(flush=True)
    sys.stdin.read()
"""


def store_of(root: Path) -> CheckpointStore:
    """Return a store with a checkpoint in the trash, past its grace period."""
    store = open_store(root, grace_seconds=0)
    for step in (1, 2):
        store.save(step, {"step": step})
    return store


def shift(root: Path, seconds: float) -> list[Path]:
    """Give all leases times as if a clock went wrong by that much."""
    found = [path for path in (root / "leases").iterdir() if "looks" not in path.name]
    for path in found:
        os.utime(path, (time.time() + seconds, time.time() + seconds))
    return found


@pytest.mark.parametrize("days", [-1, 1])
def test_a_wrong_clock_takes_no_lease_from_a_living_reader(tmp_path: Path, days: int) -> None:
    with store_of(tmp_path) as store, open_store(tmp_path) as other:
        with other[1].as_directory() as directory:
            store.remove(1)
            (lease,) = shift(tmp_path, days * DAY_SECONDS)
            (item,) = store.trash()
            assert item.held_by == "1 readers hold a lease"
            assert not store.prune()
            store.collect_garbage()
            assert lease.exists()
            assert any(directory.iterdir())
            assert len(_leases(open_storage(tmp_path), time.time())) == 1
            lease.unlink()
            next(iter(leases._held)).write()  # as each renewal does
            shift(tmp_path, days * DAY_SECONDS)
            assert not store.prune()
        assert [item.step for item in store.prune()] == [1]
        assert not list((tmp_path / "leases").iterdir())


@pytest.mark.parametrize("days", [-1, 1])
def test_the_lease_of_a_dead_reader_goes(tmp_path: Path, days: int) -> None:
    with store_of(tmp_path) as store:
        reader = subprocess.Popen(
            [sys.executable, "-c", READER, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0
        )
        try:
            assert reader.stdout is not None
            reader.stdout.readline()
            store.remove(1)
            (lease,) = shift(tmp_path, days * DAY_SECONDS)
            assert not store.prune()
            reader.kill()
            reader.wait()
            assert [item.step for item in store.prune()] == [1]
            assert not lease.exists()
        finally:
            os.killpg(reader.pid, signal.SIGKILL)
            reader.communicate()


def test_a_lease_of_another_machine_goes_after_two_looks_without_a_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage, began_seconds, late_seconds = open_storage(tmp_path), time.monotonic(), 0.0
    monkeypatch.setattr(time, "monotonic", lambda: began_seconds + late_seconds)
    lease = tmp_path / "leases/0000000001-there-1-0.json"
    lease.parent.mkdir()
    lease.write_text(json.dumps({"version": 1, "host": "there", "pid": 1, "boot": "another", "locked": True}))

    def readers() -> int:
        return len(leases.fresh(storage, now_seconds=time.time()))

    for days in (-1, 1, -2):
        shift(tmp_path, days * DAY_SECONDS)
        late_seconds += 2 * leases.FRESH_SECONDS
        assert readers() == 1  # it has changed since the look before
        late_seconds += leases.FRESH_SECONDS - 1
        assert readers() == 1
    late_seconds += 1
    leases.look(storage, now_seconds=time.time(), remember=False)
    assert lease.exists()
    assert readers() == 0
    assert not lease.exists()
    assert readers() == 0
    assert not list(lease.parent.iterdir())
