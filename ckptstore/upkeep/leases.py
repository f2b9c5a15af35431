"""Leases: a reader of a checkpoint on a disk names it, so that nobody deletes it meanwhile.

A lease is fresh for `FRESH_SECONDS` by the storage's clock. One thread of the process renews all its leases. If a lease
cannot be written, a warning is logged, the reader goes on, and the lease is tried again soon.

A forked child takes a lease of its own for every directory that its parent has handed out, and renews it as long as it
lives: the parent may be done with the directory before the child is.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from ckptstore.errors import CkptstoreError, StorageError
from ckptstore.format.encoding import FORMAT_VERSION
from ckptstore.format.layout import LEASE_PREFIX, lease_key, parse_lease_key
from ckptstore.runtime.parallel import started
from ckptstore.storage.base import Storage

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
            body = {"version": FORMAT_VERSION, "host": platform.node(), "pid": os.getpid()}
            try:
                self.storage.write(self.key, [memoryview(json.dumps(body).encode())])
                self.is_late = False
            except StorageError as error:
                if not self.is_late:
                    logger.warning("no lease could be written, so a prune may delete what is being read: %s", error)
                self.is_late = True

    def give_back(self) -> None:
        """Remove the lease after the end of the reading."""
        with self.lock:
            self.is_over = True
            try:
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
    stale = []
    for file in storage.list(LEASE_PREFIX):
        number = parse_lease_key(file.key)
        if number is None:
            continue
        if now_seconds - file.modified_seconds < FRESH_SECONDS:
            found[number] = found.get(number, 0) + 1
        else:
            stale.append(file.key)
    with suppress(CkptstoreError):  # one of another user may be in a directory of his own
        storage.delete(stale)
    return found


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
        if lease.is_handed_out:
            lease.write()
        else:
            _held.discard(lease)
    if _held:
        _start_renewer()


os.register_at_fork(after_in_child=_after_fork)
