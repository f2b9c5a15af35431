"""What deletes, and what it must not delete: what is read, what is linked in, what a copy is about to commit."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch
from uuid import uuid4

import forked_ranks
import pytest
import torch
from small_disks import mounted
from trees import Once, directories, make_tree, read_tree, save_tree, settle, steps

from ckptstore import (
    Checkpoint,
    CheckpointGone,
    KeepEvery,
    KeepLatest,
    KeepSince,
    StorageError,
    StoreFenced,
    open_store,
)
from ckptstore.errors import AccessDenied, InvalidInput, StorageUnavailable
from ckptstore.events import CheckpointsPruned, DiskFillsUp, Event, PruneFailed, listening
from ckptstore.format.changes import Claim, Commit
from ckptstore.format.layout import HINT_KEY, record_key
from ckptstore.format.record import Record
from ckptstore.interchange import copying
from ckptstore.interchange.copying import CopyReport, copy_store
from ckptstore.interchange.exporting import export
from ckptstore.log.reader import Hint
from ckptstore.storage.open import open_storage
from ckptstore.testing import Call, with_faults, wrap
from ckptstore.testing.s3_server import Fault, s3_server
from ckptstore.transfer.opened import open_place
from ckptstore.upkeep import leases
from ckptstore.upkeep.retain import retain

YEAR_SECONDS = 365 * 86400.0


# Who reads is seen

READERS: dict[str, Callable[[Checkpoint, Path], object]] = {
    "load": lambda checkpoint, _: checkpoint.load({"w": torch.zeros(1000)}),
    "to_directory": lambda checkpoint, path: checkpoint.to_directory(path / "out"),
    "verify": lambda checkpoint, _: checkpoint.verify().raise_if_damaged(),
    "export": lambda checkpoint, path: export(checkpoint, path / "out", to="safetensors"),
    "cp": lambda checkpoint, path: copying.copy_checkpoint(checkpoint, open_place(str(path / "copy"))),
}


@pytest.mark.parametrize("reader", READERS)
def test_nothing_is_pruned_while_it_is_read(tmp_path: Path, reader: str) -> None:
    root = tmp_path / "store"
    with open_store(root) as store:
        for step in (1, 2):
            store.save(step, {"w": torch.full((1000,), float(step))})
    pruned: list[int] = []

    def prune() -> None:
        with open_store(root, grace_seconds=0) as other:
            retain(other._job.log, KeepLatest(1))
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
        retain(store._job.log, KeepLatest(1))
        reading = first.as_directory()
        events: list[Event] = []
        with with_faults(open_store(root, grace_seconds=0), Once("create", "log/", reading.__enter__)) as pruner:
            now = time.time
            with listening(events.append), patch("time.time", lambda: now() + YEAR_SECONDS):  # it is not asked
                pruner.prune()
            assert pruner.trash() == []
            path = Path(first.uri)
            assert read_tree(path) == {"f": b"x", "deep/g": b"x"}
            assert [event.steps for event in events if isinstance(event, CheckpointsPruned)] == [()]
            assert "somebody reads it" in next(event.error for event in events if isinstance(event, PruneFailed))
            with pytest.raises(CheckpointGone), first.as_directory():
                """The record is there, so nobody else begins."""
            pruner.prune()
            assert path.exists()
            assert pruner.collect_garbage().left == {f"checkpoints/{path.name}": "somebody reads it"}
            reading.__exit__(None, None, None)
            pruner.prune()
            assert not path.exists()
        assert steps(store) == [2]


def test_what_a_prune_left_to_a_reader_is_garbage_after_the_next_claim_too(tmp_path: Path) -> None:
    root = tmp_path / "store"
    with open_store(root) as store:
        first = save_tree(store, tmp_path, 1)
        save_tree(store, tmp_path, 2)
        retain(store._job.log, KeepLatest(1))
        reading = first.as_directory()
        with with_faults(open_store(root, grace_seconds=0), Once("create", "log/", reading.__enter__)) as pruner:
            pruner.prune()
    with open_store(root) as other:
        other.resume()
        assert len(other.collect_garbage().left) == 1
        reading.__exit__(None, None, None)
        assert len(other.collect_garbage().attempts) == 1
    assert len(directories(root)) == 1


def test_what_is_in_flight_is_not_taken_for_left_over(tmp_path: Path) -> None:
    with open_store(tmp_path / "store", grace_seconds=0) as store:
        save_tree(store, tmp_path, 1)
        own = make_tree(tmp_path / "store/checkpoints/step-0000000005-e0001-0123abcd", {"f": b"torn"})
        store.prune()
        assert own.exists()


FORKING = """
import os, sys, time
from pathlib import Path
from ckptstore.upkeep import leases
from ckptstore import open_store
with open_store(sys.argv[1]) as store:
    checkpoint = store[1]
    with checkpoint.as_directory(), leases.hold(store._job.storage, 2):
        child = os.fork()
        if child == 0:
            mine = [path.name for path in Path(sys.argv[1], "leases").iterdir() if f"-{os.getpid()}-" in path.name]
            is_renewed = leases._renewer is not None and leases._renewer.is_alive()
            os._exit(0 if len(mine) == 1 and mine[0].startswith("0000000002-") and is_renewed else 1)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    sys.exit(code)
"""


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


def test_a_forked_child_takes_a_lease_of_its_own(tmp_path: Path) -> None:
    root = tmp_path / "store"
    with open_store(root) as store:
        save_tree(store, tmp_path, 1)
    done = subprocess.run([sys.executable, "-c", FORKING, root], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (left,) = (root / "leases").iterdir()  # the child was killed: its lease ends by its age
    assert left.name.startswith("0000000002-")


# Nothing outside of the root is touched


def moved_away(path: Path, elsewhere: Path) -> Path:
    """Move a directory to another place, and leave a link behind, as people do when a disk is full."""
    shutil.move(path, elsewhere)
    make_tree(elsewhere, {"ours/unrelated": b"1"})
    path.symlink_to(elsewhere, target_is_directory=True)
    return elsewhere


def everything(path: Path) -> list[str]:
    return sorted(str(item.relative_to(path)) for item in path.rglob("*"))


@pytest.mark.parametrize("linked", ["attempt", "inside", "checkpoints"])
def test_gc_leaves_what_is_linked_in(tmp_path: Path, linked: str) -> None:
    root = tmp_path / "store"
    with open_store(root) as store:
        save_tree(store, tmp_path, 1)
        old = make_tree(root / "checkpoints/step-0000000005-e0000-0123abcd", {"f": b"torn", "sub/g": b"torn"})
        path = {"attempt": old, "inside": old / "sub", "checkpoints": root / "checkpoints"}[linked]
        elsewhere = moved_away(path, tmp_path / "elsewhere")
        before = everything(elsewhere)
        planned = store.collect_garbage(dry_run=True)
        found = store.collect_garbage()
        assert everything(elsewhere) == before
        assert path.is_symlink()
        assert "symbolic link" in found.left[f"checkpoints/{old.name}"]
        assert found.attempts == {}
        assert linked == "inside" or planned == found


def test_a_prune_leaves_what_is_linked_in_and_deletes_the_others(tmp_path: Path) -> None:
    root = tmp_path / "store"
    with open_store(root, grace_seconds=0) as store:
        linked, plain = save_tree(store, tmp_path, 1), save_tree(store, tmp_path, 2)
        save_tree(store, tmp_path, 3)
        elsewhere = moved_away(Path(linked.uri), tmp_path / "elsewhere")
        before = everything(elsewhere)
        retain(store._job.log, KeepLatest(1))
        events: list[Event] = []
        with listening(events.append):
            store.prune()
        assert everything(elsewhere) == before
        assert not Path(plain.uri).exists()
        assert [event.steps for event in events if isinstance(event, CheckpointsPruned)] == [(2,)]
        (failed,) = (event.error for event in events if isinstance(event, PruneFailed))
        assert "step 1" in failed
        assert "symbolic link" in failed


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


# Copies


def copy(source: Path, target: Path) -> CopyReport:
    with open_store(source) as store:
        opened = open_place(str(target))
        try:
            return copy_store(store, opened)
        finally:
            opened.close()


def each_copy(action: Callable[[], object]) -> object:
    """Do something whenever the files of a checkpoint are copied, and nothing is committed yet."""
    original = copying.copy_checkpoint

    def copied(*args: object, **keywords: object) -> CopyReport:
        report = original(*args, **keywords)  # type: ignore[arg-type]
        action()
        return report

    return patch("ckptstore.interchange.copying.copy_checkpoint", copied)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A store whose third job has saved, too."""
    root = tmp_path / "source"
    for step in (1, 2, 3):
        with open_store(root) as store:
            save_tree(store, tmp_path, step, data=b"%d" % step * 1000)
    return root


def collect(root: Path, *, claim: bool = False) -> object:
    with open_store(root) as store:
        return store.collect_garbage(claim=claim)


def test_what_a_running_copy_has_written_is_no_garbage(tmp_path: Path, source: Path) -> None:
    target = tmp_path / "target"
    with each_copy(lambda: collect(target)):  # type: ignore[attr-defined]
        assert copy(source, target).steps == (1, 2, 3)
    with open_store(target) as store:
        assert [checkpoint.step for checkpoint in store if checkpoint.verify().ok] == [1, 2, 3]
        save_tree(store, tmp_path, 4)
        assert [checkpoint.step for checkpoint in store if checkpoint.verify().ok] == [1, 2, 3, 4]


def test_a_later_claim_ends_a_copy_and_makes_garbage_of_it(tmp_path: Path, source: Path) -> None:
    target = tmp_path / "target"
    with each_copy(lambda: collect(target, claim=True)), pytest.raises(StoreFenced):  # type: ignore[attr-defined]
        copy(source, target)
    assert directories(target) == []
    assert copy(source, target).steps == (1, 2, 3)
    with open_store(target) as store:
        assert [checkpoint.step for checkpoint in store if checkpoint.verify().ok] == [1, 2, 3]


def test_a_copy_that_broke_off_is_taken_over_and_leaves_nothing(tmp_path: Path, source: Path) -> None:
    target = tmp_path / "target"

    def die() -> None:
        raise KeyboardInterrupt

    with each_copy(die), pytest.raises(KeyboardInterrupt):  # type: ignore[attr-defined]
        copy(source, target)
    (torn,) = (target / "checkpoints").iterdir()
    (torn / "f").chmod(0o600)
    (torn / "f").write_bytes(b"2" * 1000)  # of the right size, and yet not whole
    report = copy(source, target)
    assert (report.steps, report.num_found, report.num_copied) == ((1, 2, 3), 1, 5)
    assert len(directories(target)) == 3
    again = copy(source, target)
    assert (again.steps, again.present) == ((), (1, 2, 3))
    with open_store(target) as store:
        assert [checkpoint.step for checkpoint in store if checkpoint.verify().ok] == [1, 2, 3]
        found = store.collect_garbage(claim=True)
        assert (found.attempts, found.left) == ({}, {})


def test_a_copy_takes_nothing_from_the_trash_of_its_target(tmp_path: Path, source: Path) -> None:
    target = tmp_path / "target"
    copy(source, target)
    with open_store(target) as store:
        trashed = [Path(store[step].uri) for step in (2, 3)]
        store.roll_back(1)
        assert copy(source, target).steps == (2, 3)
        assert all(read_tree(path) for path in trashed)
        assert [item.step for item in store.trash()] == [2, 3]
        assert [checkpoint.step for checkpoint in store if checkpoint.verify().ok] == [1, 2, 3]


def test_a_copy_counts_its_saves_anew(source: Path, tmp_path: Path) -> None:
    copy(source, tmp_path / "target")
    with open_store(tmp_path / "target") as store:
        log = store._job.log
        newest = log.newest()
        assert newest is not None
        epoch = newest.state.epoch
        assert [record.entry.order for record in log.records(newest.state.live)] == [(epoch, 1), (epoch, 2), (epoch, 3)]
        assert log.verify_chain() == []


def test_the_log_takes_no_directory_of_another_epoch(source: Path) -> None:
    with open_store(source) as store:
        log = store._job.log
        entry = log.records([log.newest().number])[0].entry  # type: ignore[union-attr]
        log.append(lambda _newest: Claim("another", 1, above_epoch=7))
        with pytest.raises(InvalidInput, match="was not begun in the writer epoch"):
            log.append(lambda newest: Commit(entry=replaced_epoch(entry, newest)))  # type: ignore[arg-type]


def replaced_epoch(entry: object, newest: Record) -> object:
    from dataclasses import replace

    return replace(entry, epoch=newest.state.epoch)  # type: ignore[type-var]


# Garbage


def test_gc_believes_the_log_and_no_hint(tmp_path: Path) -> None:
    root = tmp_path / "store"
    with open_store(root) as store:
        save_tree(store, tmp_path, 1)
        newest = store._job.log.newest()
        save_tree(store, tmp_path, 2)
        for change in (Claim("a", 1), Claim("b", 1), Claim("c", 1)):
            newest = Record.following(newest, change, write_id=uuid4().hex, created_at=0.0)
        live = newest.state.latest
        assert live is not None
        (root / HINT_KEY).chmod(0o600)
        (root / HINT_KEY).write_bytes(Hint(newest, None).encode())
    with open_store(root) as other:
        assert other.collect_garbage().attempts == {}
        assert steps(other) == [1, 2]
        assert other[2].verify().ok


def marks(root: Path, token: str) -> Path:
    """What ranks left more than an hour ago."""
    path = make_tree(root / "group" / token, {"member.00000": b"1", "life.00001": b"."})
    for file in path.iterdir():
        os.utime(file, (0, time.time() - 7200))
    return path


def test_messages_go_when_their_job_was_superseded_and_not_by_a_clock(tmp_path: Path) -> None:
    root = tmp_path / "store"
    with open_store(root) as store:
        for token in ("job-1", "job-10", "job-2"):
            store._job.log.append(lambda _newest, token=token: Claim(token, 2))  # type: ignore[misc]
        save_tree(store, tmp_path, 1)
        store._job.log.append(lambda _newest: Claim("job-3", 2))
        old, live, reader = marks(root, "job-1~2"), marks(root, "job-3~2"), marks(root, "eval-1")
        young = make_tree(root / "group/job-10", {"member.00000": b"1"})
        found = store.collect_garbage()
        assert found.exchanges == ["group/job-1~2/"]
        assert list(found.left) == ["group/eval-1/"]
        assert (old.exists(), live.exists(), reader.exists(), young.exists()) == (False, True, True, True)
        found = store.collect_garbage(claim=True)
        assert found.exchanges == ["group/eval-1/", "group/job-3~2/"]


# Retention


@pytest.mark.parametrize("directory", ["", "log", "leases", "cursors", "group/gone"])
def test_gc_removes_what_a_killed_writer_left_and_nothing_of_a_living_one(tmp_path: Path, directory: str) -> None:
    root = tmp_path / "store"
    with open_store(root) as store:
        save_tree(store, tmp_path, 1)
    names = {age: root / directory / f".ckptstore-tmp-{age}-0123456789abcdef" for age in (60, 7200)}
    (root / directory).mkdir(parents=True, exist_ok=True)
    for age, path in names.items():
        path.write_bytes(b"half")
        os.utime(path, (time.time() - age, time.time() - age))
    with open_store(root) as store:
        key = str(names[7200].relative_to(root))
        assert store.collect_garbage(dry_run=True).unfinished == [key]
        assert names[7200].exists()
        assert store.collect_garbage().unfinished == [key]
        assert [path.exists() for path in names.values()] == [True, False]
        assert store[1].verify().ok


def test_gc_removes_the_lease_of_a_reader_that_was_killed(tmp_path: Path) -> None:
    root = tmp_path / "store"
    with open_store(root) as store:
        save_tree(store, tmp_path, 1)
        make_tree(root / "leases", {"0000000002-here-1-00000000.json": b"{}", "0000000002-here-2-00000000.json": b"{}"})
        os.utime(root / "leases/0000000002-here-1-00000000.json", (0, 0))
        store.collect_garbage()
    assert everything(root / "leases") == ["0000000002-here-2-00000000.json"]


def test_gc_removes_an_empty_directory_of_a_superseded_group(tmp_path: Path) -> None:
    root = tmp_path / "store"
    with open_store(root) as store:
        save_tree(store, tmp_path, 1)
    (root / "group" / "gone").mkdir(parents=True)
    os.utime(root / "group" / "gone", (0, 0))
    with open_store(root) as store:
        assert "group/gone/" in store.collect_garbage().left  # perhaps of readers
        assert store.collect_garbage(claim=True).exchanges == ["group/gone/"]
    assert not (root / "group" / "gone").exists()


@pytest.mark.parametrize("wrong_seconds", [YEAR_SECONDS, -YEAR_SECONDS])
def test_a_wrong_clock_drops_nothing(tmp_path: Path, wrong_seconds: float) -> None:
    now = time.time
    with open_store(tmp_path / "store", retention=KeepSince(3600)) as store:
        for step in (1, 2):
            save_tree(store, tmp_path, step)
        with patch("time.time", lambda: now() + wrong_seconds):
            save_tree(store, tmp_path, 3)
        save_tree(store, tmp_path, 4)
        assert steps(store) == [1, 2, 3, 4]


def test_ages_are_those_of_the_records_in_a_copy_too(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    with open_store(source) as store:
        for age_hours, step in ((5, 1), (3, 2), (0, 3)):
            number = save_tree(store, tmp_path, step).number
            assert number is not None
            os.utime(source / record_key(number), (0, time.time() - age_hours * 3600))
    copy(source, target)
    with open_store(target, retention=KeepEvery(seconds=3600)) as store:
        save_tree(store, tmp_path, 4)
        assert steps(store) == [1, 2, 3, 4]
    with open_store(target, retention=KeepSince(4 * 3600)) as store:
        save_tree(store, tmp_path, 5)
        assert steps(store) == [2, 3, 4, 5]


def test_a_disk_that_fills_up_is_told_before_it_is_full(tmp_path: Path) -> None:
    source = tmp_path / "big"
    source.mkdir()
    (source / "f").write_bytes(bytes(200_000))
    with mounted(tmp_path / "disk", "3m") as place:
        for retention, grace_seconds in ((KeepLatest(1), 0), (KeepLatest(20), 0), (KeepLatest(1), 3600)):
            events: list[DiskFillsUp] = []
            root = place / f"store-{len(list(place.iterdir()))}"
            with listening(events.append, DiskFillsUp):  # type: ignore[arg-type]
                for step in range(9):  # opened anew, so that what is behind a save has ended before the next one
                    with open_store(root, retention=retention, grace_seconds=grace_seconds) as store:
                        store.save_directory(step, source)
            if len(events):
                assert grace_seconds or retention == KeepLatest(20)
                assert events[0].saves_left == events[0].free_bytes // events[0].bytes_per_save < 10
                assert "the disk of the store is full in about" in events[0].line()
            assert bool(events) == (retention == KeepLatest(20) or bool(grace_seconds))
            shutil.rmtree(root)


# Who may not delete

NOBODY = 65534


def trash_of_who_may_not_delete(root: str, **options: Any) -> list[PruneFailed]:
    """Save three steps, of which retention keeps one, and return the failures of the prunes behind them."""
    failures: list[PruneFailed] = []
    with (
        listening(cast(Callable[[Event], None], failures.append), PruneFailed),
        open_store(root, grace_seconds=0, group="solo", retention=KeepLatest(1), **options) as store,
    ):
        for step in (10, 20, 30):
            store.save(step, {"w": torch.ones(3)})
            store._held.wait_for_prune()
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
