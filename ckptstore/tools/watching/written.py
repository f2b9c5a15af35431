"""Measure how much of a file is written. On a disk a large file has its whole size, and its room, before anything is
written."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable

from ckptstore.storage.base import Disk, Storage, StoredFile

_SMALL_BYTES = 1 << 20
"""A file of that size gets no room beforehand; its size is what was written."""
_MOST_RANGES = 256
"""The most ranges of one file in one look. What lies behind them counts as not written."""


class WrittenBytes:
    """Adds up what is written of files, and looks no more into those that were found whole."""

    def __init__(self, storage: Storage) -> None:
        self._disk = storage if isinstance(storage, Disk) else None
        self._whole: set[tuple[str, str | None]] = set()

    def of(self, files: Iterable[StoredFile]) -> int:
        """Return the bytes that are written of all of them. Reads none."""
        return sum(self._of_file(file) for file in files)

    def forget(self, prefix: str) -> None:
        """Forget the files below that prefix, which are gone."""
        self._whole = {known for known in self._whole if not known[0].startswith(prefix)}

    def _of_file(self, file: StoredFile) -> int:
        if self._disk is None or file.size_bytes <= _SMALL_BYTES or (file.key, file.version) in self._whole:
            return file.size_bytes
        written_bytes = min(data_bytes(os.fspath(self._disk.local_path(file.key)), file.size_bytes), file.size_bytes)
        if written_bytes == file.size_bytes:
            self._whole.add((file.key, file.version))
        return written_bytes


def data_bytes(path: str, size_bytes: int) -> int:
    """Return how much of a file is no hole: room that nothing was written to is one. `size_bytes` if that is unknown.

    Raises nothing.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return size_bytes
    found_bytes = position = 0
    try:
        for _ in range(_MOST_RANGES):
            start = os.lseek(descriptor, position, os.SEEK_DATA)
            position = os.lseek(descriptor, start, os.SEEK_HOLE)
            found_bytes += position - start
            if position >= size_bytes:
                break
    except OSError as error:  # ENXIO: there is no more data
        if error.errno != errno.ENXIO:
            return size_bytes
    finally:
        os.close(descriptor)
    return found_bytes
