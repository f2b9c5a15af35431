"""Write new files on a disk, in parts by several threads, and make files durable."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ckptstore.errors import FileMissing, StorageError
from ckptstore.format.digest import Digest
from ckptstore.runtime.parallel import mapped
from ckptstore.storage.disk import posix

if TYPE_CHECKING:
    from ckptstore.storage.disk.direct import DirectFile

_WRITE_BACK_BYTES = 8 << 20
"""The bytes that are written before the disk is made to begin with them."""
_SMALL_BYTES = 1 << 20
"""The size up to which a file is written at once, and needs no room beforehand."""
_FLUSHES_AT_ONCE = 8
READ_ONLY = 0o444
"""The mode of files that are never changed in place; their creator can still write through its descriptor."""
WRITABLE = 0o666
"""The mode, less the umask, of the user's files."""
_MANY_FILES = 16
"""The number of files from which one flush of a whole file system is cheaper than an fsync of each."""


class NewFile:
    """A new file that has its name, and its room, from the beginning: the `PartWriter` of a disk. Its parts may come in
    any order."""

    def __init__(
        self,
        key: str,
        path: str,
        *,
        size_bytes: int,
        writes_back: bool,
        direct: bool = False,
        mode: int = WRITABLE,
        flushed: Callable[[str], None] | None = None,
    ) -> None:
        """Create the file, and its directory if absent. Raises StorageFull when there is no room, StorageError when the
        path exists.

        `writes_back` has the disk begin early, for a file that is fsynced in the end; `direct` bypasses the page cache
        where that is possible. `key` is for errors. `flushed` is called with it after an fsync, which None leaves out.
        """
        self._key = key
        self._path = path
        self._size_bytes = size_bytes
        self._writes_back = writes_back
        self._flushed = flushed
        self._direct: DirectFile | None = None
        try:
            is_direct = direct and posix.writes_directly(path)
            self._descriptor = _open_new(path, mode, os.O_DIRECT if is_direct else 0)
        except OSError as error:
            raise self._error(error) from error
        try:
            if size_bytes > _SMALL_BYTES:
                posix.allocate(self._descriptor, size_bytes)
        except OSError as error:
            self.abort()
            raise self._error(error) from error
        if is_direct:
            from ckptstore.storage.disk.direct import DirectFile

            self._direct = DirectFile(self._descriptor)

    def write_part(self, offset: int, views: Sequence[memoryview], digest: Digest | None = None) -> None:
        """Write the views one after another. Raises StorageError."""
        try:
            if self._direct:
                self._direct.write(views, offset)
                return
            posix.write_at(self._descriptor, views, offset)
        except OSError as error:
            raise self._error(error) from error
        end = offset + sum(map(len, views))
        if self._writes_back and (end % _WRITE_BACK_BYTES == 0 or end == self._size_bytes):
            start = max(0, end - 1) // _WRITE_BACK_BYTES * _WRITE_BACK_BYTES
            posix.start_writing_back(self._descriptor, start, end - start)

    def finish(self) -> None:
        """Complete and close the file. Raises a StorageError that is not retryable: a second fsync may lie about the
        first."""
        try:
            if self._direct:
                self._direct.finish()
            if self._flushed:
                os.fsync(self._descriptor)
            self._close()
        except OSError as error:
            failed = self._error(error)
            raise StorageError(failed.message, file=self._key) if failed.retryable else failed from error
        if self._flushed:
            self._flushed(self._key)

    def abort(self) -> None:
        """Remove the file. Never raises."""
        with contextlib.suppress(OSError):
            self._close()
        with contextlib.suppress(OSError):
            os.unlink(self._path)

    def _close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _error(self, error: OSError) -> StorageError:
        return _failed(error, self._key, self._path, self._size_bytes)


def _failed(error: OSError, key: str, path: str, size_bytes: int) -> StorageError:
    failed = posix.translate(
        error, what=f"Writing {path}", file=key, needed_bytes=size_bytes, directory=os.path.dirname(path)
    )
    # Somebody has removed the directory: FileMissing would say that what is read is not there.
    return StorageError(failed.message, file=key) if isinstance(failed, FileMissing) else failed


def _open_new(path: str, mode: int, flags: int = 0) -> int:
    flags |= os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        return os.open(path, flags, mode)
    except FileNotFoundError:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        return os.open(path, flags, mode)


def write_new(key: str, path: str, view: memoryview, *, mode: int) -> None:
    """Write a small new file as `NewFile` does, in less time. `key` is for errors.

    The directory is created if absent. Raises StorageFull, and StorageError when the path exists; a failed write
    leaves no file.
    """
    try:
        descriptor = _open_new(path, mode)
        try:
            posix.write_at(descriptor, (view,), 0)
        except BaseException:
            os.unlink(path)
            raise
        finally:
            os.close(descriptor)
    except OSError as error:
        raise _failed(error, key, path, len(view)) from error


def flush_files(paths: Sequence[str]) -> None:
    """Call fsync for files. Raises OSError."""
    if len(paths) >= _MANY_FILES:
        paths = _left_by_filesystem_flush(paths)
    flush_all(posix.flush, paths)


def flush_all(flush: Callable[[str], object], paths: Sequence[str]) -> None:
    """Call a function that flushes for each path, for several at once. Raises OSError."""
    # One after another, each may wait for a commit of the file system's journal; together they share one.
    mapped(flush, paths, num_threads=_FLUSHES_AT_ONCE, name="ckptstore-flush")


def _left_by_filesystem_flush(paths: Sequence[str]) -> Sequence[str]:
    devices = {directory: os.stat(directory or "/").st_dev for directory in _parents(paths)}
    places = {device: directory or "/" for directory, device in devices.items()}
    left = {device for device, directory in places.items() if not posix.flush_filesystem(directory)}
    return [path for path in paths if devices[path.rpartition("/")[0]] in left] if left else ()


def make_durable(paths: Sequence[str]) -> None:
    """Call fsync for files and the directories that hold them. Raises StorageError."""
    try:
        flush_files(paths)
        flush_all(posix.flush_directory, [directory or "/" for directory in _parents(paths)])
    except OSError as error:
        place = os.path.commonpath(paths)
        raise posix.translate(error, what=f"Making {place} durable", file=place, directory=place) from error


def _parents(paths: Sequence[str]) -> set[str]:
    return {path.rpartition("/")[0] for path in paths}
