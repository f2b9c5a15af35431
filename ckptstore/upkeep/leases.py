"""Leases: a reader of a checkpoint on a disk names it, so that nobody deletes it meanwhile.

A lease is fresh for `FRESH_SECONDS` by the storage's clock. One thread of the process renews all its leases. If a lease
cannot be written, a warning is logged, the reader goes on, and the lease is tried again soon.

On some file systems each machine stamps its files itself, with a clock that may be wrong. So on a disk a time that is
not fresh is no proof yet. The reader also locks its lease (flock) while it reads: as long as the lock is seen, the
reader lives. The lease of another machine, whose lock may not be seen here, must have been the same in two looks of one
machine that are `FRESH_SECONDS` apart.

A forked child takes a lease of its own for every directory that its parent has handed out, and renews it as long as it
lives: the parent may be done with the directory before the child is.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from ckptstore.errors import CkptstoreError, FileMissing, StorageError
from ckptstore.format.encoding import FORMAT_VERSION, parse_json
from ckptstore.format.layout import LEASE_PREFIX, lease_key, parse_lease_key
from ckptstore.node_cache.place import boot_id
from ckptstore.runtime.file_locks import is_locked, is_named, lock_open_file
from ckptstore.runtime.parallel import started
from ckptstore.storage.base import Disk, Storage, StoredFile
from ckptstore.storage.retry import briefly

FRESH_SECONDS = 600.0
RENEW_SECONDS = 120.0
_AGAIN_SECONDS = 2.0
"""The time after which a lease that could not be written is tried again."""

logger = logging.getLogger("ckptstore")


@dataclass(eq=False, slots=True)
class _Lease:
    storage: Storage
    number: int
    is_handed_out: bool
    """True if the caller has the real path, which a forked child may still read later."""
    key: str = ""
    is_over: bool = False
    is_late: bool = False
    """True if the last write of it failed."""
    descriptor: int | None = None
    """The locked file, on a disk with locks."""
    lock: threading.Lock = field(default_factory=lambda: threading.Lock())
    """The lock of writing and giving back: a late renewal would leave a lease behind that nobody gives back."""

    def write(self) -> None:
        """Write the lease under a unique name, which the first write chooses. Do nothing if it was given back."""
        with self.lock:
            if self.is_over:
                return
            self.key = self.key or lease_key(
                self.number, f"{platform.node()[:40] or 'host'}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
            )
            try:
                self._write()
                if isinstance(self.storage, Disk) and not self._is_locked(self.storage):
                    self._lock(self.storage)
                    self._write()  # only now, so that nobody takes one that is about to be locked for a dead one
                self.is_late = False
            except StorageError as error:
                if not self.is_late:
                    logger.warning("no lease could be written, so a prune may delete what is being read: %s", error)
                self.is_late = True

    def _write(self) -> None:
        body = {"version": FORMAT_VERSION, "host": platform.node(), "pid": os.getpid(), "boot": boot_id()}
        data = json.dumps(body | {"locked": self.descriptor is not None}).encode()
        if isinstance(self.storage, Disk):
            self.storage.overwrite(self.key, data)  # a new file would not have the lock
        else:
            self.storage.write(self.key, [memoryview(data)])

    def _is_locked(self, disk: Disk) -> bool:
        """True if the lock is on the file that has the name: somebody may have removed the one before."""
        return self.descriptor is not None and is_named(disk.local_path(self.key), self.descriptor)

    def _lock(self, disk: Disk) -> None:
        """Lock the file, if locks work here."""
        self.unlock()
        with suppress(OSError):
            self.descriptor = os.open(disk.local_path(self.key), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            if lock_open_file(self.descriptor, shared=True):
                return
        self.unlock()

    def unlock(self) -> None:
        """Close the locked file. The lock ends once every process that has inherited it does so."""
        if self.descriptor is not None:
            os.close(self.descriptor)
        self.descriptor = None

    def give_back(self) -> None:
        """Remove the lease after the end of the reading."""
        with self.lock:
            self.is_over = True
            self.unlock()
            try:
                with briefly():
                    self.storage.delete([self.key] if self.key else [])
            except StorageError as error:
                logger.debug("the lease %s could not be removed: %s", self.key, error)


_held: set[_Lease] = set()
_lock = threading.Lock()
_released = threading.Event()
"""The event that the last lease was given back, upon which the thread that renews them ends, or that one is late."""
_renewer: threading.Thread | None = None


@contextmanager
def hold(storage: Storage, number: int, *, is_handed_out: bool = False) -> Iterator[None]:
    """Protect the checkpoint with that number from deletion while the context lasts.

    A checkpoint that the log dropped before may be deleted all the same: read the log once inside. `is_handed_out` says
    that the caller gets the real path, so that a forked child protects the checkpoint too.
    """
    lease = _Lease(storage, number, is_handed_out)
    lease.write()
    with _lock:
        _held.add(lease)
        _start_renewer()
        if lease.is_late:
            _released.set()  # wakes up the thread, which may have written the others a moment ago
    try:
        yield
    finally:
        with _lock:
            _held.discard(lease)
            if not _held:
                _released.set()
        lease.give_back()


def fresh(storage: Storage, *, now_seconds: float) -> dict[int, int]:
    """Return the number of fresh leases for each checkpoint number that somebody reads, and remove all other leases, if
    this process may.

    `now_seconds` is by the storage's clock; an earlier time finds at least as many leases.
    """
    found: dict[int, int] = {}
    living, stale = look(storage, now_seconds=now_seconds)
    for number, _ in living:
        found[number] = found.get(number, 0) + 1
    with suppress(CkptstoreError):  # one of another user may be in a directory of his own
        storage.delete(stale)
    return found


def look(
    storage: Storage, *, now_seconds: float, remember: bool = True
) -> tuple[list[tuple[int, StoredFile]], list[str]]:
    """Return the fresh leases, each with its checkpoint number, and the keys of all others.

    With `remember` a later look knows of this one, by a small file in the store; it is written only where a lease of
    another machine looks old.
    """
    living: list[tuple[int, StoredFile]] = []
    stale: list[str] = []
    doubted: dict[str, tuple[int, StoredFile]] = {}
    looks_key, has_looks = f"{LEASE_PREFIX}looks-{boot_id()}.json", False
    for file in storage.list(LEASE_PREFIX):
        number = parse_lease_key(file.key)
        has_looks |= file.key == looks_key
        if number is None:
            continue
        if abs(now_seconds - file.modified_seconds) < FRESH_SECONDS or not isinstance(storage, Disk):
            is_dead: bool | None = now_seconds - file.modified_seconds >= FRESH_SECONDS
        else:
            is_dead = _is_dead(storage, file, is_old=now_seconds > file.modified_seconds)
        if is_dead is None:
            doubted[file.key] = (number, file)
        elif is_dead:
            stale.append(file.key)
        else:
            living.append((number, file))
    if doubted or (has_looks and remember):
        gone = _unchanged(storage, looks_key, [file for _, file in doubted.values()], remember=remember)
        stale += gone
        living += [found for key, found in doubted.items() if key not in gone]
    return living, stale


def _is_dead(storage: Storage, file: StoredFile, *, is_old: bool) -> bool | None:
    """On a disk: return whether the reader has ended, for a lease whose time is not fresh; None if nobody knows."""
    assert isinstance(storage, Disk)
    try:
        body = parse_json(storage.read(file.key))
    except FileMissing:
        return True
    except StorageError:
        return None
    except ValueError:
        body = None
    # The order counts: a body that speaks of a lock was written under it.
    locked = is_locked(storage.local_path(file.key))
    boot = body.get("boot") if isinstance(body, dict) else None
    if locked:
        return False
    if not boot:  # of another program: only its time counts
        return is_old
    has_lock = body.get("locked") is True
    if boot != boot_id() or (has_lock and locked is None):
        return None
    return is_old or has_lock  # one machine has one clock


def _unchanged(storage: Storage, looks_key: str, files: Sequence[StoredFile], *, remember: bool) -> set[str]:
    """Return the keys of those leases that were the same `FRESH_SECONDS` ago, in a look of this machine."""
    try:
        before = parse_json(storage.read(looks_key))
    except (StorageError, ValueError):
        before = {}
    now_seconds = time.monotonic()  # counts from the boot, for all processes of the machine
    looks: dict[str, list[Any]] = {}
    for file in files:
        match before:
            case {file.key: [file.version, int() | float() as since]} if since <= now_seconds:
                looks[file.key] = [file.version, since]
            case _:
                looks[file.key] = [file.version, now_seconds]
    if remember and looks != before:
        with suppress(StorageError):
            if looks:
                storage.write(looks_key, [memoryview(json.dumps(looks).encode())])
            else:
                storage.delete([looks_key])
    return {key for key, (_, since) in looks.items() if now_seconds - since >= FRESH_SECONDS}


def _start_renewer() -> None:
    global _renewer
    if _renewer is None:
        _renewer = started(_renew, name="ckptstore-leases")


def _renew() -> None:
    global _renewer
    wait_seconds = RENEW_SECONDS
    while True:
        _released.wait(wait_seconds)
        with _lock:
            _released.clear()
            held = list(_held)
            if not held:
                _renewer = None
                return
        for lease in held:
            lease.write()
        wait_seconds = _AGAIN_SECONDS if any(lease.is_late for lease in held) else RENEW_SECONDS


def _after_fork() -> None:
    """In a forked child: take leases of handed-out directories, forget all others, and start a thread to renew."""
    # The child has no renewing thread, and no thread that was reading; another thread may have held the lock.
    global _lock, _released, _renewer
    _lock, _released, _renewer = threading.Lock(), threading.Event(), None
    for lease in list(_held):
        lease.lock, lease.key = threading.Lock(), ""  # the old key is the parent's, which gives it back
        lease.unlock()  # the parent's too, whose death the lock shall show
        if lease.is_handed_out:
            lease.write()
        else:
            _held.discard(lease)
    if _held:
        _start_renewer()


os.register_at_fork(after_in_child=_after_fork)
