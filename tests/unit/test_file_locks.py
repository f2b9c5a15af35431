"""Locks on files: one holder at a time, or many that share, until the last process that has it is gone."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from ckptstore.runtime.file_locks import Exclusive, lock_open_file, locks_work

HOLDER = """
import os, sys, time
from ckptstore.runtime.file_locks import Exclusive, lock_open_file
if sys.argv[2] == "exclusive":
    lock = Exclusive(sys.argv[1])
    assert lock.take()
else:
    descriptor = os.open(sys.argv[1], os.O_RDONLY)
    assert lock_open_file(descriptor, shared=sys.argv[2] == "shared")
if sys.argv[3] == "forks" and os.fork() == 0:
    if sys.argv[2] == "exclusive":
        lock.give_back()  # of the parent's, which a child does not have
    print(os.getpid(), flush=True)
    time.sleep(600)
if sys.argv[3] == "alone":
    print(os.getpid(), flush=True)
time.sleep(600)
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "lock").touch()
    return tmp_path / "lock"


class Holder:
    """A process that holds a lock, and the process that says so, which may be its child."""

    def __init__(self, path: Path, kind: str, how: str = "alone") -> None:
        command = [sys.executable, "-c", HOLDER, str(path), kind, how]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
        assert self.process.stdout is not None
        self.child = int(self.process.stdout.readline())

    def __enter__(self) -> Holder:
        return self

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


def takes(path: Path, *, shared: bool) -> bool:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return lock_open_file(descriptor, shared=shared)
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("kind", ["exclusive", "exclusive by descriptor"])
def test_a_lock_goes_with_a_process_that_is_killed(path: Path, kind: str) -> None:
    with Holder(path, kind) as holder:
        started = time.monotonic()
        assert not Exclusive(path).take()
        assert time.monotonic() - started < 5
        assert not Exclusive(path).take(wait_seconds=0.2)
        assert not takes(path, shared=True)
        threading.Timer(0.2, holder.kill).start()
        lock = Exclusive(path)
        assert lock.take(wait_seconds=60)
        lock.give_back()
        lock.give_back()
    assert path.exists()
    assert takes(path, shared=False)


def test_readers_share_and_keep_others_out(path: Path) -> None:
    with Holder(path, "shared") as holder:
        assert takes(path, shared=True)
        assert not takes(path, shared=False)
        assert not Exclusive(path).take()
        holder.kill()
        assert takes(path, shared=False)


def test_a_forked_child_has_no_exclusive_lock_and_releases_none(path: Path) -> None:
    """So that the turn to download ends with the process that has it, whatever workers it has forked."""
    with Holder(path, "exclusive", "forks") as holder:
        assert not Exclusive(path).take()
        holder.kill()
        os.kill(holder.child, 0)
        assert Exclusive(path).take()


@pytest.mark.parametrize("kind", ["shared", "exclusive by descriptor"])
def test_a_forked_child_has_what_was_locked_by_its_descriptor(path: Path, kind: str) -> None:
    """So that a worker that its reader has forked keeps the copy, and a trainer the folder."""
    with Holder(path, kind, "forks") as holder:
        holder.kill()
        assert not takes(path, shared=False)
        os.kill(holder.child, signal.SIGKILL)
        assert Exclusive(path).take(wait_seconds=60)


def test_threads_of_one_process_exclude_each_other(path: Path) -> None:
    taken = []
    with Exclusive(path).held() as ours:
        assert ours
        thread = threading.Thread(target=lambda: taken.append(Exclusive(path).take()))
        thread.start()
        thread.join()
        with Exclusive(path).held() as again:
            assert not again
    assert taken == [False]
    with Exclusive(path).held(wait_seconds=1) as ours:
        assert ours


def test_a_lock_file_that_its_holder_removes_is_made_again(path: Path) -> None:
    lock, waiting = Exclusive(path), Exclusive(path)
    assert lock.take()
    timer = threading.Timer(0.3, lambda: (path.unlink(), lock.give_back()))
    timer.start()
    assert waiting.take(wait_seconds=60)
    timer.join()
    assert path.exists()
    assert path.stat().st_mode & 0o777 == 0o600
    assert not Exclusive(path).take()
    waiting.give_back()


def test_a_lost_directory_is_not_made_again(path: Path) -> None:
    """It would have another mode, by which the owner of the directory would then refuse it."""
    lock, waiting = Exclusive(path.parent / "gone" / "lock"), Exclusive(path)
    with pytest.raises(FileNotFoundError):
        lock.take()
    assert not (path.parent / "gone").exists()
    with Holder(path, "exclusive"):
        timer = threading.Timer(0.3, lambda: shutil.rmtree(path.parent))
        timer.start()
        with pytest.raises(FileNotFoundError):
            waiting.take(wait_seconds=60)
        timer.join()
    assert not path.parent.exists()


def test_a_file_that_lost_its_name_before_it_was_locked_is_not_the_lock(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS renames a file that is removed while it is open, so that its count of names does not tell."""
    flock, names = fcntl.flock, iter(["1", "2"])

    def removed_first(descriptor: int, kind: int) -> None:
        if not kind & fcntl.LOCK_UN and (name := next(names, "")):
            path.rename(path.with_name(f".nfs{name}"))
        flock(descriptor, kind)

    monkeypatch.setattr(fcntl, "flock", removed_first)
    lock = Exclusive(path)
    assert not lock.take()
    assert lock.take(wait_seconds=60)
    assert not takes(path, shared=True)
    lock.give_back()


def test_a_symbolic_link_is_not_followed(path: Path) -> None:
    link = path.with_name("link")
    link.symlink_to(path)
    with pytest.raises(OSError, match="symbolic links"):
        Exclusive(link).take()


def test_locks_are_tried_and_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert locks_work(tmp_path / "probe")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        locks_work(tmp_path / "nowhere" / "probe")

    def missing(descriptor: int, kind: int) -> None:
        raise OSError(38, "Function not implemented")

    for pretended in (lambda descriptor, kind: None, missing):
        monkeypatch.setattr(fcntl, "flock", pretended)
        assert not locks_work(tmp_path / "probe")
    with pytest.raises(OSError, match="not implemented"):
        Exclusive(tmp_path / "lock").take()
