"""What deletes, and what it must not delete: what is read, by whatever clock, what is linked in, what others own."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import forked_ranks
import pytest
import torch
from click.testing import CliRunner
from small_disks import mounted
from trees import Once, directories, everything, heard, make_tree, moved_away, read_tree, save_tree, settle, steps

from ckptstore import Checkpoint, CheckpointGone, CheckpointStore, KeepLatest, KeepSince, StorageError, open_store
from ckptstore.errors import AccessDenied, StorageUnavailable
from ckptstore.events import CheckpointsPruned, DiskFillsUp, PruneFailed
from ckptstore.extensions.exchange import copying
from ckptstore.interchange import export
from ckptstore.storage.open import open_storage
from ckptstore.testing import Call, with_faults, wrap
from ckptstore.testing.s3_server import Fault, s3_server
from ckptstore.tools.cli import main
from ckptstore.transfer.opened import open_place
from ckptstore.upkeep import leases

DAY_SECONDS = 86_400
YEAR_SECONDS = 365 * 86400.0


# Who reads is seen

READERS: dict[str, Callable[[Checkpoint, Path], object]] = {
    "load": lambda checkpoint, _: checkpoint.load({"w": torch.zeros(1000)}),
    "to_directory": lambda checkpoint, path: checkpoint.to_directory(path / "out"),
    "verify": lambda checkpoint, _: checkpoint.verify().raise_if_damaged(),
    "export": lambda checkpoint, path: export(checkpoint, path / "out", to="safetensors"),
    "cp": lambda checkpoint, path: copying.copy_checkpoint(checkpoint, open_place(str(path / "copy"))),
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A store of which step 1 is in the trash, past its grace period for who has none, and step 2 is live."""
    with open_store(tmp_path / "store") as store:
        for step in (1, 2):
            store.save(step, {"w": torch.full((1000,), float(step))})
        store.retain(KeepLatest(1))
    return tmp_path / "store"


@pytest.mark.parametrize("reader", READERS)
def test_nothing_is_pruned_while_it_is_read(tmp_path: Path, reader: str) -> None:
    root = tmp_path / "store"
    with open_store(root) as store:
        for step in (1, 2):
            store.save(step, {"w": torch.full((1000,), float(step))})
    pruned: list[int] = []

    def prune() -> None:
        with open_store(root, grace_seconds=0) as other:
            other.retain(KeepLatest(1))
            pruned.extend(item.step for item in other.prune())

    hook = Once("read_into", "checkpoints/", prune)
    if reader == "cp":
        hook = Once("read", "checkpoints/", prune, phase="after")
    with with_faults(open_store(root), hook) as store:
        READERS[reader](store[1], tmp_path)
    assert hook.action is None
    assert pruned == []
    with open_store(root, grace_seconds=0) as store:
        assert [item.step for item in store.prune()] == [1]
    assert list((root / "leases").iterdir()) == []


def test_a_reader_who_comes_before_the_record_keeps_the_files_and_a_later_prune_finds_them(tmp_path: Path) -> None:
    root = tmp_path / "store"
    with open_store(root) as store:
        first = save_tree(store, tmp_path, 1)
        save_tree(store, tmp_path, 2)
        store.retain(KeepLatest(1))
        reading, path = first.as_directory(), Path(first.uri)
        with with_faults(open_store(root, grace_seconds=0), Once("create", "log/", reading.__enter__)) as pruner:
            now = time.time
            with (
                heard(CheckpointsPruned) as pruned,
                heard(PruneFailed) as failed,
                patch("time.time", lambda: now() + YEAR_SECONDS),  # it is not asked
            ):
                pruner.prune()
            assert pruner.trash() == []
            assert read_tree(path) == {"f": b"x", "deep/g": b"x"}
            assert [event.steps for event in pruned] == [()]
            assert "somebody reads it" in failed[0].error
            with pytest.raises(CheckpointGone), first.as_directory():
                """The record is there, so nobody else begins."""
            pruner.prune()
            assert path.exists()
            left = {f"checkpoints/{path.name}": "somebody reads it"}
            assert pruner.collect_garbage().left == left
            with open_store(root) as other:
                other.resume()
                assert other.collect_garbage().left == left, "it is garbage after the next claim too"
                reading.__exit__(None, None, None)
                assert list(other.collect_garbage().attempts) == [path.name]
        assert (steps(store), directories(root)) == ([2], [Path(store[2].uri).name])


def test_a_later_prune_deletes_what_was_left_to_a_reader(tmp_path: Path) -> None:
    with open_store(tmp_path / "store") as store:
        first = save_tree(store, tmp_path, 1)
        save_tree(store, tmp_path, 2)
        store.retain(KeepLatest(1))
    hook = Once("create", "log/", (reading := first.as_directory()).__enter__)
    with with_faults(open_store(tmp_path / "store", grace_seconds=0), hook) as pruner:
        pruner.prune()
        reading.__exit__(None, None, None)
        own = make_tree(tmp_path / "store/checkpoints/step-0000000005-e0001-0123abcd", {"f": b"in flight"})
        pruner.prune()
        assert not Path(first.uri).exists()
        assert own.exists(), "what is in flight is not taken for left over"


FORKING = """
import os, sys
from pathlib import Path
from ckptstore.upkeep import leases
from ckptstore import open_store
with open_store(sys.argv[1]) as store:
    checkpoint = store[2]
    with checkpoint.as_directory(), leases.hold(store._job.storage, 3):
        child = os.fork()
        if child == 0:
            mine = [path.name for path in Path(sys.argv[1], "leases").iterdir() if f"-{os.getpid()}-" in path.name]
            is_renewed = leases._renewer is not None and leases._renewer.is_alive()
            os._exit(0 if len(mine) == 1 and mine[0].startswith("0000000003-") and is_renewed else 1)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    sys.exit(code)
"""


def test_a_forked_child_takes_a_lease_of_its_own(root: Path) -> None:
    done = subprocess.run([sys.executable, "-c", FORKING, root], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (left,) = (root / "leases").iterdir()  # the child was killed: its lease ends by its age
    assert left.name.startswith("0000000003-")


def test_a_lease_that_could_not_be_written_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(leases, "_AGAIN_SECONDS", 0.01)
    storage, failures = open_storage(tmp_path), iter([True] * 3)

    def fail(call: Call) -> None:
        if call.verb == "write" and call.phase == "before" and next(failures, False):
            raise StorageUnavailable("A fault was injected")

    with leases.hold(storage, 1), leases.hold(wrap(storage, fail), 2):
        deadline = time.monotonic() + 60
        while len(leases.fresh(storage, now_seconds=time.time())) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert next(failures, None) is None
    assert leases.fresh(storage, now_seconds=time.time()) == {}
    assert caplog.text.count("no lease could be written") == 1


# No clock of a machine takes a lease away from a living reader, and a dead one's lease goes in the end

READER = """
import os, sys, time
from ckptstore import open_store
from ckptstore.upkeep import leases
with open_store(sys.argv[1]) as store, leases.hold(store._job.storage, store[1].number):
    if os.fork() == 0:  # a child that is no reader, and outlives it; its fork is over when it speaks
        print(flush=True)
        time.sleep(600)
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
            seen = CliRunner().invoke(main, ["report", str(tmp_path), "--json"])
            assert len(json.loads(seen.stdout)["stores"][0]["health"]["leases"]) == 1
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
    storage, began_seconds, late_seconds = open_storage(tmp_path), 1000.0, 0.0
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


@pytest.mark.parametrize("wrong_seconds", [YEAR_SECONDS, -YEAR_SECONDS])
def test_a_wrong_clock_drops_nothing(tmp_path: Path, wrong_seconds: float) -> None:
    now = time.time
    with open_store(tmp_path / "store", retention=KeepSince(3600)) as store:
        for step in (1, 2, 3, 4):
            with patch("time.time", lambda: now() + (wrong_seconds if step == 3 else 0)):  # noqa: B023
                store.save_directory(step, None)
        assert steps(store) == [1, 2, 3, 4]


# Nothing outside of the root is touched


def test_a_prune_leaves_what_is_linked_in_and_deletes_the_others(tmp_path: Path) -> None:
    with open_store(tmp_path / "store", grace_seconds=0) as store:
        linked, plain, _ = (save_tree(store, tmp_path, step) for step in (1, 2, 3))
        elsewhere = moved_away(Path(linked.uri), tmp_path / "elsewhere")
        before = everything(elsewhere)
        store.retain(KeepLatest(1))
        with heard(CheckpointsPruned) as pruned, heard(PruneFailed) as failed:
            store.prune()
        assert everything(elsewhere) == before
        assert not Path(plain.uri).exists()
        assert [event.steps for event in pruned] == [(2,)]
        assert ["step 1" in event.error and "symbolic link" in event.error for event in failed] == [True]


@pytest.mark.parametrize("name", ["checkpoints", "log"])
def test_nothing_is_saved_through_a_link(tmp_path: Path, name: str) -> None:
    root = tmp_path / "store"
    with open_store(root) as store:
        save_tree(store, tmp_path, 1)
        elsewhere = moved_away(root / name, tmp_path / "elsewhere")
        before = everything(elsewhere)
        with pytest.raises(StorageError, match="symbolic link"):
            save_tree(store, tmp_path, 2)
        assert everything(elsewhere) == before
        assert store[1].verify().ok, "what is read may lie behind a link"


def test_the_root_may_lie_below_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with open_store(tmp_path / "link/store", retention=KeepLatest(1), grace_seconds=0) as store:
        for step in (1, 2):
            save_tree(store, tmp_path, step)
        settle(store)
        assert len(directories(tmp_path / "real/store")) == 1


# When it is told, and who may not delete


def test_a_disk_that_fills_up_is_told_before_it_is_full(tmp_path: Path) -> None:
    source = tmp_path / "big"
    source.mkdir()
    (source / "f").write_bytes(bytes(200_000))
    with mounted(tmp_path / "disk", "3m") as place:
        for retention, grace_seconds in ((KeepLatest(1), 0), (KeepLatest(20), 0), (KeepLatest(1), 3600)):
            root = place / f"store-{len(list(place.iterdir()))}"
            with heard(DiskFillsUp) as events:
                for step in range(9):  # opened anew, so that what is behind a save has ended before the next one
                    with open_store(root, retention=retention, grace_seconds=grace_seconds) as store:
                        store.save_directory(step, source)
            if len(events):
                assert grace_seconds or retention == KeepLatest(20)
                assert events[0].saves_left == events[0].free_bytes // events[0].bytes_per_save < 10
                assert "the disk of the store is full in about" in events[0].line()
            assert bool(events) == (retention == KeepLatest(20) or bool(grace_seconds))
            shutil.rmtree(root)


NOBODY = 65534


def trash_of_who_may_not_delete(root: str, **options: Any) -> list[PruneFailed]:
    """Save three steps, of which retention keeps one, and return the failures of the prunes behind them."""
    with (
        heard(PruneFailed) as failures,
        open_store(root, grace_seconds=0, group="solo", retention=KeepLatest(1), **options) as store,
    ):
        for step in (10, 20, 30):
            store.save(step, {"w": torch.ones(3)})
            settle(store)
        with pytest.raises(AccessDenied, match=r"stay in the trash \(step .*; .* KiB\)"):
            store.prune()
    return failures


def test_what_a_job_may_not_delete_in_a_bucket_stays_in_the_trash() -> None:
    with s3_server(buckets=["b"]) as server:
        options = {"storage_options": server.storage_options}
        denied = Fault(action="status", status=403, code="AccessDenied", match="^(DELETE|POST .*delete)", times=None)
        server.faults.add(denied)
        (failure,) = trash_of_who_may_not_delete("s3://b/run", **options)  # said once
        assert "(step 10; 2.0 KiB)" in failure.error
        assert len([key for key in server.objects.buckets["b"] if "/clock-" in key]) == 1
        server.faults.clear()
        with open_store("s3://b/run", grace_seconds=0, group="solo", **options) as host:
            assert [item.step for item in host.trash()] == [10, 20]
            host.restore(10).verify().raise_if_damaged()
            assert [item.step for item in host.prune()] == [20]
        kept = {key.split("/")[2] for key in server.objects.buckets["b"] if "/checkpoints/" in key}
        assert sorted(name[:15] for name in kept) == ["step-0000000010", "step-0000000030"]


def as_nobody(root: str) -> list[str]:
    """Return the errors of the prunes of a job of a user with no rights."""
    os.setgroups([])
    os.setegid(NOBODY)
    os.seteuid(NOBODY)
    os.environ["CKPTSTORE_CACHE_DIR"] = f"{root}-cache"
    try:
        return [failure.error for failure in trash_of_who_may_not_delete(root)]
    finally:
        os.seteuid(0)  # to tell it


def test_what_a_job_may_not_delete_on_a_disk_stays_in_the_trash_and_its_own_goes() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can be another user")
    with tempfile.TemporaryDirectory(prefix="ckptstore-users-") as directory:
        Path(directory).chmod(0o755)
        root = f"{directory}/run"
        with open_store(root, group="solo") as store:
            store.save(1, {"w": torch.ones(3)})
            store.save(2, {"w": torch.ones(3)})  # the one that the job resumes from
        for path in (Path(root), *Path(root).iterdir()):
            if path.is_dir():
                path.chmod(0o777)
        ((failure,),) = forked_ranks.run_ranks(1, as_nobody, root)
        assert "(step 1; 2.0 KiB)" in failure
        kept = sorted(path.name[:15] for path in Path(f"{root}/checkpoints").iterdir())
        assert kept == [f"step-{step:010}" for step in (1, 2, 30)]
        with open_store(root, grace_seconds=0, group="solo") as host:
            assert [item.step for item in host.trash()] == [1]
            host.restore(1).verify().raise_if_damaged()
