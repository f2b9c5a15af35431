"""Leases: flocks on small files, which the kernel releases when their holder dies.

A reader locks the lease of a copy shared, and looks for the copy only then; who wants to remove the copy locks the
lease exclusively. Threads of one process share one lock and count. A lease is released by closing its file, never by
unlocking it, so that a worker forked by a reader keeps the copy as long as it lives.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ckptstore.errors import CacheError
from ckptstore.node_cache.place import CachePlace

_FLAGS = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
_POLL_SECONDS = 0.01


@dataclass(slots=True)
class _Held:
    descriptor: int
    readers: int


_held: dict[Path, _Held] = {}
_mutex = threading.Lock()


def _after_fork() -> None:
    global _mutex
    _mutex = threading.Lock()  # another thread of the parent may have held it


os.register_at_fork(after_in_child=_after_fork)


def take(place: CachePlace, key: str, *, wait_seconds: float) -> None:
    """Lock the lease of a copy for one more reader of this process.

    Raises CacheError when somebody who removes the copy takes longer than `wait_seconds` for it.
    """
    path, deadline = place.lease(key), time.monotonic() + wait_seconds
    while place.locks_work:
        with _mutex, place.using():
            if path in _held:
                _held[path].readers += 1
                return
            descriptor = lock(path, fcntl.LOCK_SH, create=True)
            if descriptor is not None:
                _touch(descriptor)
                _held[path] = _Held(descriptor, 1)
                return
        if time.monotonic() > deadline:
            raise CacheError(f"{path} was locked by another process for {wait_seconds:.0f} seconds")
        time.sleep(_POLL_SECONDS)


def release(place: CachePlace, key: str) -> bool:
    """Give back what `take` took; True when it was the last reader of this process."""
    if not place.locks_work:
        return False
    path = place.lease(key)
    with _mutex:
        held = _held[path]
        held.readers -= 1
        if held.readers:
            return False
        del _held[path]
        with contextlib.suppress(OSError):
            _touch(held.descriptor)  # idle time counts from now
        os.close(held.descriptor)
        return True


def _touch(descriptor: int) -> None:
    now = time.time_ns()  # the kernel's own stamp is too coarse to tell which of two copies was used last
    os.utime(descriptor, ns=(now, now))


def note_size(place: CachePlace, key: str, size_bytes: int) -> None:
    """Write down how large a copy is, so that nobody needs to walk through it. The caller holds the lease."""
    with contextlib.suppress(OSError):
        place.lease(key).write_text(f"{size_bytes}\n")


def last_use(place: CachePlace, key: str) -> tuple[float, int]:
    """When the last reader came or went, in seconds since the epoch, and the size of the copy in bytes."""
    path = place.lease(key)
    try:
        return path.stat().st_mtime, int(path.read_text())
    except (OSError, ValueError):  # a process died before it could say, or somebody cleaned up here
        files = [item.lstat() for item in place.copy(key).rglob("*")]
        return place.copy(key).stat().st_mtime, sum(status.st_size for status in files)


@contextlib.contextmanager
def excluding_readers(place: CachePlace, key: str) -> Iterator[bool]:
    """True while nobody reads the copy, and nobody can begin to; False, at once, when somebody does."""
    descriptor = lock(place.lease(key), fcntl.LOCK_EX, create=True) if place.locks_work else None
    try:
        yield descriptor is not None
    finally:
        if descriptor is not None:
            os.close(descriptor)


def forget(place: CachePlace, key: str) -> None:
    """Remove what is kept beside a copy that is gone. The caller excludes readers, and so everybody who has the turn to
    download: who opened one of these files before finds out, by its inode, that it has no name any more."""
    for path in (*(place.root / "locks").glob(f"{key}.*"), place.lease(key)):
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def private_directory(place: CachePlace) -> Iterator[Path]:
    """A path of one's own, at which there is nothing yet. What is there in the end is removed, and `sweep` removes it
    when this process dies first."""
    name, descriptor = "", None
    while descriptor is None:
        name = f"{os.getpid()}-{secrets.token_hex(8)}"
        with place.using():
            os.close(os.open(place.private_lease(name), _FLAGS | os.O_CREAT | os.O_EXCL, 0o600))
            descriptor = lock(place.private_lease(name), fcntl.LOCK_EX, create=False) if place.locks_work else -1
    try:
        yield place.private(name)
    finally:
        shutil.rmtree(place.private(name), ignore_errors=True)
        place.private_lease(name).unlink(missing_ok=True)
        if descriptor >= 0:
            os.close(descriptor)


def sweep(place: CachePlace) -> None:
    """Remove the private directories of dead processes. Best effort."""
    if not place.locks_work:
        return
    names = {path.name.removeprefix(".tmp-") for path in place.root.glob(".tmp-*")}
    names |= {path.name.removeprefix("tmp-") for path in (place.root / "leases").glob("tmp-*")}
    for name in names:
        with contextlib.suppress(OSError):
            _sweep_one(place, name)


def _sweep_one(place: CachePlace, name: str) -> None:
    path = place.private_lease(name)
    descriptor = lock(path, fcntl.LOCK_EX, create=False)
    if descriptor is None and path.exists():
        return
    # Where the lease file is gone, nobody owns the directory either: an owner removes the directory first.
    try:
        shutil.rmtree(place.private(name), ignore_errors=True)
        path.unlink(missing_ok=True)
    finally:
        if descriptor is not None:
            os.close(descriptor)


def lock(path: Path, kind: int, *, create: bool) -> int | None:
    """Lock a file, at once: its descriptor, or None when another one holds it or, without `create`, it is not there."""
    try:
        descriptor = os.open(path, _FLAGS | (os.O_CREAT if create else 0), 0o600)
    except FileNotFoundError:
        if create:
            raise
        return None
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        named, held = path.stat(), os.fstat(descriptor)
        if (named.st_dev, named.st_ino) == (held.st_dev, held.st_ino):
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        """Held by another one, or replaced between open and lock: a lock on a file without a name keeps nobody out."""
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None
