"""Read what this node serves: from finished copies on its disk, else from the storage."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from ckptstore.errors import CkptstoreError
from ckptstore.storage.base import Storage
from ckptstore.transfer.moves import FinishedCopy

_MAX_COPIES = 8
"""The most copies that are known at once, the latest ones."""


class ServedStore:
    """One open store, as a node reads it for others. Safe for threads."""

    def __init__(self, storage: Storage) -> None:
        """Do not take over the storage."""
        self.uri = storage.uri
        self._storage = storage
        self._copies: tuple[tuple[str, Mapping[str, str], FinishedCopy], ...] = ()
        """Replaced as a whole. No lock guards it: a forked child would find that locked for ever."""

    def offer(self, copy_key: str, names: Iterable[tuple[str, str]], finished: FinishedCopy) -> None:
        """Serve files from a copy as long as it exists. `names` has their keys in the storage and names in the copy."""
        others = [copy for copy in self._copies if copy[0] != copy_key]
        self._copies = (*others[1 - _MAX_COPIES :], (copy_key, dict(names), finished))

    def read(self, key: str, offset: int, data: memoryview) -> None:
        """Fill memory with bytes of a file. Raises the errors of the storage."""
        if not self._read_copy(key, offset, data):
            self._storage.read_into(key, offset, [data])

    def _read_copy(self, key: str, offset: int, data: memoryview) -> bool:
        """Fill memory from a finished copy. Return False if there is none with these bytes; memory may hold anything
        then. Whoever gets them compares digests."""
        for _, names, finished in self._copies:
            if key not in names:
                continue
            try:
                with finished() as path:
                    if path is not None and _read_file(path / names[key], offset, data):
                        return True
            except (OSError, CkptstoreError):
                """It vanished, or its disk fails: it is not here."""
        return False


def _read_file(path: Path, offset: int, data: memoryview) -> bool:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        return os.preadv(descriptor, [data], offset) == len(data)
    finally:
        os.close(descriptor)
