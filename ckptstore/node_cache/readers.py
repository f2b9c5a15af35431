"""Leases: locks on small files, which the kernel releases when their holder dies.

A reader locks the lease of a copy shared, and looks for the copy only then; a process that removes the copy locks the
lease exclusively. Threads of one process share one lock and a count. A lease is released by closing its file, never by
unlocking it, so that a worker forked by a reader keeps the copy as long as it lives.
"""

from __future__ import annotations

import contextlib
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
from ckptstore.runtime.file_locks import Exclusive, is_named, lock_open_file

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

    Raises CacheError when another process takes longer than `wait_seconds` to remove the copy.
    """
    path, deadline = place.lease(key), time.monotonic() + wait_seconds
    while place.locks_work:
        with _mutex, place.using():
            if path in _held:
                _held[path].readers += 1
                return
            descriptor = _lease(path, shared=True)
            if descriptor is not None:
                _touch(descriptor)
                _held[path] = _Held(descriptor, 1)
                return
        if time.monotonic() > deadline:
            raise CacheError(f"{path} was locked by another process for {wait_seconds:.0f} seconds")
        time.sleep(_POLL_SECONDS)


def _lease(path: Path, *, shared: bool) -> int | None:
    """Return the descriptor of a lease, locked, or None if others hold it or have removed it meanwhile."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        if lock_open_file(descriptor, shared=shared) and is_named(path, descriptor):
            return descriptor
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def release(place: CachePlace, key: str) -> bool:
    """Release the lease that `take` locked; return True if it was the last reader of this process."""
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
    """Write down the size of a copy, so that nobody needs to walk through it. The caller holds the lease."""
    with contextlib.suppress(OSError):
        place.lease(key).write_text(f"{size_bytes}\n")


def last_use(place: CachePlace, key: str) -> tuple[float, int]:
    """Return the time when the last reader came or went, in seconds since the epoch, and the copy's size in bytes."""
    path = place.lease(key)
    try:
        return path.stat().st_mtime, int(path.read_text())
    except (OSError, ValueError):  # a process died before it noted the size, or somebody cleaned the directory
        files = [item.lstat() for item in place.copy(key).rglob("*")]
        return place.copy(key).stat().st_mtime, sum(status.st_size for status in files)


@contextlib.contextmanager
def excluding_readers(place: CachePlace, key: str) -> Iterator[bool]:
    """Yield True while nobody reads the copy, and nobody can begin to; False, at once, if somebody reads it."""
    # By its descriptor, for filelock takes 0.4 ms: each use of the cache looks at all copies.
    descriptor = _lease(place.lease(key), shared=False) if place.locks_work else None
    try:
        yield descriptor is not None
    finally:
        if descriptor is not None:
            os.close(descriptor)


def forget(place: CachePlace, key: str) -> None:
    """Remove the locks and the lease of a copy that is gone. The caller excludes readers, and so a process that has the
    turn to download. A process that opened one of these files before notices, by its inode, that its name is gone."""
    for path in (*(place.root / "locks").glob(f"{key}.*"), place.lease(key)):
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def private_directory(place: CachePlace) -> Iterator[Path]:
    """Yield a path that no other process uses. A directory there is removed in the end, by `sweep` if the process
    dies."""
    with place.using():
        while True:
            name = f"{os.getpid()}-{secrets.token_hex(8)}"
            lease = Exclusive(place.private_lease(name))
            if not place.locks_work or lease.take():
                break
    try:
        yield place.private(name)
    finally:
        shutil.rmtree(place.private(name), ignore_errors=True)
        place.private_lease(name).unlink(missing_ok=True)
        lease.give_back()


def sweep(place: CachePlace) -> None:
    """Remove the private directories of dead processes. Best effort."""
    if not place.locks_work:
        return
    names = {path.name.removeprefix(".tmp-") for path in place.root.glob(".tmp-*")}
    names |= {path.name.removeprefix("tmp-") for path in (place.root / "leases").glob("tmp-*")}
    for name in names:
        # Where the lease file is gone, nobody owns the directory either: an owner removes the directory first.
        with contextlib.suppress(OSError), Exclusive(place.private_lease(name)).held() as is_left:
            if is_left:
                shutil.rmtree(place.private(name), ignore_errors=True)
                place.private_lease(name).unlink(missing_ok=True)
