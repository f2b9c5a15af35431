"""Lock files, for the processes of one node. The system releases the locks when their holders end, in any way."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

_POLL_SECONDS = 0.05


NO_LOCKS = frozenset({errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK})
"""Errors of a file system that has no locks."""


class Exclusive:
    """An exclusive lock on a file of this user, created if absent, which stays when the lock is released.

    A child that is forked meanwhile does not hold it. The holder of the lock may remove the file: waiting processes
    then wait for the new file of that name.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        from filelock import FileLock  # only here and below: a save and a load do without it

        # The object has the lock, not a thread. A soft lock, which filelock makes of a file on a system without flock,
        # would outlive a process that is killed.
        self._lock = FileLock(
            path, mode=0o600, thread_local=False, fallback_to_soft=False, on_acquired=self._check_name
        )

    def take(self, *, wait_seconds: float = 0.0) -> bool:
        """Try to take it for that long, at least once; return True if it is held. Raises OSError, FileNotFoundError
        if its directory is gone."""
        deadline = time.monotonic() + wait_seconds
        while not self._try():
            left_seconds = deadline - time.monotonic()
            if left_seconds <= 0:
                return False
            time.sleep(min(_POLL_SECONDS, left_seconds))
        return True

    def _try(self) -> bool:
        from filelock import Timeout

        Path(self._lock.lock_file).parent.stat()  # filelock would make a lost one, and let others in
        with contextlib.suppress(Timeout):
            self._lock.acquire(blocking=False)
            return True
        return False

    def _check_name(self, descriptor: int) -> None:
        from filelock import Timeout

        if not is_named(self._lock.lock_file, descriptor):
            raise Timeout(self._lock.lock_file)

    def give_back(self) -> None:
        """Release it, if it is held."""
        self._lock.release()

    @contextlib.contextmanager
    def held(self, *, wait_seconds: float = 0.0) -> Iterator[bool]:
        """Hold it while the context lasts; yield True in one process at a time, False if another holds it that long."""
        is_held = self.take(wait_seconds=wait_seconds)
        try:
            yield is_held
        finally:
            if is_held:
                self.give_back()


def is_named(path: str | os.PathLike[str], descriptor: int) -> bool:
    """Return True if the path still leads to the open file: a lock on another one keeps nobody out.

    On NFS an open file that is removed keeps a name, though not this one.
    """
    try:
        return os.path.samestat(os.lstat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def lock_open_file(descriptor: int, *, shared: bool) -> bool:
    """Lock an open file at once; return False if others hold it. Raises OSError where there are no locks.

    Closing the descriptor releases the lock, and nothing else does: forked children, and processes that inherit the
    descriptor, hold it too until they close it or end. Readers rely on that, and so does the trainer of an agent.
    """
    if not shared:
        from filelock import lock_descriptor

        return lock_descriptor(descriptor, blocking=False)
    try:  # filelock's shared lock is one on an SQLite database, which no child keeps
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_locked(path: str | os.PathLike[str]) -> bool | None:
    """Return whether a process, this one included, holds a lock of a file; None if that cannot be seen from here."""
    flags = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
        try:
            first = os.open(path, os.O_RDWR | flags)  # NFS wants it for an exclusive lock
        except PermissionError:
            first = os.open(path, os.O_RDONLY | flags)
        stack.callback(os.close, first)
        if not lock_open_file(first, shared=False):
            return True
        stack.callback(os.close, second := os.open(path, os.O_RDONLY | flags))
        if not lock_open_file(second, shared=True):  # where a second lock is not refused, nobody sees any
            return False
    return None


def locks_work(probe: str | os.PathLike[str]) -> bool:
    """Return True if a second lock on one file is refused: some file systems have none, some only pretend.

    Raises OSError where the file cannot be created.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    first = os.open(probe, flags, 0o600)
    with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
        stack.callback(os.close, first)
        stack.callback(os.close, second := os.open(probe, flags, 0o600))
        # The first one is shared, so that two processes may probe at once.
        return lock_open_file(first, shared=True) and not lock_open_file(second, shared=False)
    return False
