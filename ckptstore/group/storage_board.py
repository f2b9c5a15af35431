"""A board made of a few small objects in the store itself, for ranks that have nothing else in common.

    group/<start token>/member.00003          the process that holds rank 3
    group/<start token>/00000012.00003        the answer of rank 3 to meeting 12
    group/<start token>/00000012.result       the leader's result
    group/<start token>/life.00003            rank 3's sign of life: a new size each time

The leader clears them; `ckptstore gc` removes those of a job that died.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import count
from typing import TypeVar

from ckptstore.errors import CkptstoreError, FileMissing, StorageError
from ckptstore.format.layout import AGAIN, GROUP_PREFIX
from ckptstore.group.life import LEFT
from ckptstore.runtime.parallel import mapped, started
from ckptstore.storage.base import Storage, create_if_able
from ckptstore.storage.retry import briefly

logger = logging.getLogger("ckptstore.group")

T = TypeVar("T")

_NUM_THREADS = 32
_REMOVAL_SECONDS = 10.0
"""The longest wait at the end for messages that are being removed; `gc` removes those that stay."""
_SIGN_SIZES = 61
_LAST_SIGN_BYTES = 64
"""The size of the last sign: larger than any other, so that no half-written sign is taken for it."""


class StorageBoard:
    """A `Board` below one prefix of a storage."""

    shortest_poll_seconds = 0.005

    def __init__(
        self,
        storage: Storage,
        *,
        start_token: str,
        world_size: int,
        number: Callable[[], int] = lambda: 1,
    ) -> None:
        """`number` is called once, when this rank meets the others, and returns how often it has done that."""
        self._storage = storage
        self._start_token = start_token
        self._number = number
        self._counter = count()
        self._lock = threading.Lock()
        self._removals: list[threading.Thread] = []
        self.longest_poll_seconds = max(1.0, world_size / 256)  # all ranks together: at most 256 requests a second
        self.hint = (
            "Look for its process and its log. If this is the first call of the job, check that every rank "
            f"sees the same {storage.uri} and has the start_token {start_token!r}"
        )

    @cached_property
    def _prefix(self) -> str:
        # Not below that of the time before: its leader removes the directory, perhaps after this rank has come back.
        number = self._number()
        again = f"{AGAIN}{number}" if number > 1 else ""
        return f"{GROUP_PREFIX}{self._start_token}{again}/"

    def post(self, key: str, data: bytes) -> bytes | None:
        key = self._prefix + key
        is_first = create_if_able(self._storage, key, data)
        if is_first:
            return None
        try:
            there = self._storage.read(key)
        except FileMissing:
            if is_first is not None:
                raise
            self._storage.write(key, [memoryview(data)])
            there = self._storage.read(key)
        return None if there == data else there

    def fetch(self, keys: Sequence[str]) -> dict[str, bytes]:
        """See `Board.fetch`. One listing finds the existing ones of several keys."""
        if len(keys) > 1:
            wanted = {self._prefix + key for key in keys}
            prefix = self._prefix + _common_prefix(keys)
            keys = [key for key in self._list(prefix) if key in wanted]
        else:
            keys = [self._prefix + key for key in keys]
        found = zip(keys, self._each(self._storage.read_if_there, keys), strict=True)
        return {key.removeprefix(self._prefix): data for key, data in found if data is not None}

    def _list(self, prefix: str) -> dict[str, Hashable]:
        return {
            file.key: LEFT if file.size_bytes >= _LAST_SIGN_BYTES else (file.size_bytes, file.version)
            for file in self._storage.list(prefix)
        }

    def give_sign(self, key: str, *, last: bool = False) -> None:
        size_bytes = _LAST_SIGN_BYTES if last else 1 + next(self._counter) % _SIGN_SIZES
        view = memoryview(b"." * size_bytes)
        self._storage.write(self._prefix + key, [view])

    def signs(self, keys: Sequence[str]) -> Mapping[str, Hashable]:
        """See `Board.signs`. Costs one listing, whatever the number of ranks."""
        signs = self._list(self._prefix + _common_prefix(keys))
        return {key: signs[self._prefix + key] for key in keys if self._prefix + key in signs}

    def remove(self, keys: Sequence[str]) -> None:
        if keys:
            full = [self._prefix + key for key in keys]
            thread = started(lambda: self._remove_now(full), name="ckptstore-group")
            if thread is None:
                self._remove_now(full)
                return
            with self._lock:
                self._removals[:] = [one for one in (*self._removals, thread) if one.is_alive()]

    def _remove_now(self, keys: Sequence[str]) -> None:
        try:
            with briefly():
                self._storage.delete(keys)
        except CkptstoreError as error:
            logger.warning("messages of a finished meeting could not be removed: %s", error)

    def close(self, *, emptied: bool) -> None:
        """See `Board.close`. The storage is not closed."""
        with self._lock:
            removals, self._removals = self._removals, []
        ends_at = time.monotonic() + _REMOVAL_SECONDS
        for thread in removals:
            thread.join(max(0.0, ends_at - time.monotonic()))
        if any(thread.is_alive() for thread in removals):
            logger.warning("messages below %s may stay: %s does not answer", self._prefix, self._storage.uri)
        if emptied:
            try:
                self._storage.remove_directories(self._prefix.rstrip("/"))
            except (StorageError, OSError) as error:
                logger.debug("%s stays: %s", self._prefix, error)

    def _each(self, call: Callable[[str], T], keys: Sequence[str]) -> Iterable[T]:
        num_threads = _NUM_THREADS if len(keys) > 2 else 1
        return mapped(call, list(keys), num_threads=num_threads, name="ckptstore-group")


def _common_prefix(keys: Sequence[str]) -> str:
    """Return the common prefix, below which few other keys lie: keys of one request differ at their end."""
    return os.path.commonprefix(list(keys))  # noqa: RUF071 - keys are strings, not paths
