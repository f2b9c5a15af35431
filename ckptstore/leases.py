"""Leases: a reader of real paths on a disk says which checkpoint it reads, so that nobody deletes it meanwhile.

Best effort: a lease that cannot be written warns and stops nobody. It is fresh for `FRESH_SECONDS` by the storage's
clock; one thread of the process renews all leases that it holds, and the storage's clock is read off the lease that is
written last.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

from ckptstore.encoding import FORMAT_VERSION
from ckptstore.errors import StorageError
from ckptstore.layout import LEASE_PREFIX, lease_key, parse_lease_key
from ckptstore.storage.base import Storage

FRESH_SECONDS = 600.0
RENEW_SECONDS = 120.0

logger = logging.getLogger("ckptstore")

_held: dict[tuple[int, str], Storage] = {}
_lock = threading.Lock()
_released = threading.Event()
"""Set when the last lease is given back: the thread that renews them ends."""
_renewer: threading.Thread | None = None


@contextmanager
def hold(storage: Storage, number: int) -> Iterator[None]:
    """Keep the checkpoint with that number from being deleted while the context lasts."""
    key = lease_key(number, f"{platform.node()[:40] or 'host'}-{os.getpid()}-{uuid.uuid4().hex[:8]}")
    _write(storage, key)
    with _lock:
        _held[id(storage), key] = storage
        _start_renewer()
    try:
        yield
    finally:
        with _lock:
            del _held[id(storage), key]
            if not _held:
                _released.set()
        try:
            storage.delete([key])
        except StorageError as error:
            logger.debug("the lease %s could not be removed: %s", key, error)


def fresh(storage: Storage, *, now_seconds: float) -> dict[int, int]:
    """For each number that somebody reads, how many leases there are; `now_seconds` is by the storage's clock."""
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
    storage.delete(stale)
    return found


def _write(storage: Storage, key: str) -> None:
    body = {"version": FORMAT_VERSION, "host": platform.node(), "pid": os.getpid()}
    try:
        storage.write(key, [memoryview(json.dumps(body).encode())])
    except StorageError as error:
        logger.warning("no lease could be written, so a prune may delete what is being read: %s", error)


def _start_renewer() -> None:
    global _renewer
    if _renewer is None:
        _renewer = threading.Thread(target=_renew, name="ckptstore-leases", daemon=True)
        _renewer.start()


def _renew() -> None:
    global _renewer
    while True:
        _released.wait(RENEW_SECONDS)
        with _lock:
            _released.clear()
            held = list(_held.items())
            if not held:
                _renewer = None
                return
        for lease, storage in held:
            if lease in _held:
                _write(storage, lease[1])
