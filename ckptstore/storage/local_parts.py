"""One file on a disk that several threads write in parts."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence

from ckptstore.errors import StorageError
from ckptstore.storage import posix

_WRITE_BACK_BYTES = 8 << 20
"""How much is written before the disk is told to begin with it."""


class LocalParts:
    """The `PartWriter` of `LocalStorage`: the file has its name, and its room, from the beginning."""

    def __init__(
        self, key: str, path: str, descriptor: int, *, size_bytes: int, flushed: Callable[[str], None] | None
    ) -> None:
        """Takes over the descriptor of a new file. `flushed` hears of the key when it was fsynced; None asks for no
        fsync. Raises StorageFull when there is no room."""
        self._key = key
        self._path = path
        self._descriptor = descriptor
        self._flushed = flushed
        self._size_bytes = size_bytes
        try:
            posix.allocate(descriptor, size_bytes)
        except OSError as error:
            self.abort()
            raise self._error(error) from error

    def write_part(self, offset: int, views: Sequence[memoryview]) -> None:
        try:
            posix.write_at(self._descriptor, views, offset)
        except OSError as error:
            raise self._error(error) from error
        end = offset + sum(map(len, views))
        if self._flushed and (end % _WRITE_BACK_BYTES == 0 or end == self._size_bytes):
            start = (end - 1) // _WRITE_BACK_BYTES * _WRITE_BACK_BYTES
            posix.start_writing_back(self._descriptor, start, end - start)

    def finish(self) -> None:
        """Raises a StorageError that is not worth a retry: a second fsync may lie about the first."""
        try:
            if self._flushed:
                os.fsync(self._descriptor)
            self._close()
        except OSError as error:
            failed = self._error(error)
            if failed.retryable:
                failed = StorageError(failed.message, file=self._key)
            raise failed from error
        if self._flushed:
            self._flushed(self._key)

    def abort(self) -> None:
        with contextlib.suppress(OSError):
            self._close()
        with contextlib.suppress(OSError):
            os.unlink(self._path)

    def _close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _error(self, error: OSError) -> StorageError:
        return posix.translate(
            error,
            what=f"Writing {self._path}",
            file=self._key,
            needed_bytes=self._size_bytes,
            directory=os.path.dirname(self._path),
        )
