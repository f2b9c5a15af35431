"""Test by trying whether a storage can create-if-absent: some servers refuse the condition, some ignore it."""

from __future__ import annotations

import threading
import uuid
from contextlib import suppress

from ckptstore.errors import CkptstoreError
from ckptstore.format.layout import PROBE_PREFIX
from ckptstore.runtime.parallel import mapped
from ckptstore.storage.base import CreatesExclusively, Storage, Unsupported
from ckptstore.storage.retry import briefly

_RACERS = 8
_RACE_SECONDS = 5.0


def is_server(storage: Storage) -> bool:
    """Return True if another program keeps the files, so that only its responses are known."""
    return "://" in storage.uri and not storage.uri.startswith("memory://")


def has_exclusive_create(storage: Storage) -> bool:
    """Return True if exactly one of eight creates of one new key wins, and a ninth one loses.

    Costs about ten small requests below "probe/" and removes the key. Raises the first error of the creates if none of
    them won (StorageUnavailable, AccessDenied), unless a plain write succeeds where they are unsupported.
    """
    if not isinstance(storage, CreatesExclusively):
        return False
    key = f"{PROBE_PREFIX}{uuid.uuid4().hex}"
    start = threading.Barrier(_RACERS)
    errors: list[CkptstoreError] = []

    def race(racer: int) -> bool:
        with suppress(threading.BrokenBarrierError):  # a racer without a thread of its own comes later
            start.wait(_RACE_SECONDS)
        try:
            return storage.create(key, b"racer %d" % racer)
        except CkptstoreError as error:
            errors.append(error)
            return False

    try:
        wins = sum(mapped(race, range(_RACERS), num_threads=_RACERS, name="ckptstore-probe"))
        if not wins and any(isinstance(error, Unsupported) for error in errors):
            storage.write(key, [memoryview(b"plain")])
            return False
        if not wins and errors:
            raise errors[0]
        return wins == 1 and not storage.create(key, b"late")
    finally:
        with suppress(CkptstoreError), briefly():  # the creates may have been retried for all of the time
            storage.delete([key])
