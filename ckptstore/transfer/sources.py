"""Sources: bytes to be written, from memory or from a file. Independent of torch.

A source is read in ranges, by several threads at once. It declares some of its ranges as payloads: those get a digest
for each block of 1 MiB beside the digest of the whole file (`ckptstore.format.digest`).
"""

from __future__ import annotations

import errno
import os
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple, Protocol

from ckptstore.errors import CkptstoreError, InvalidSource, SourceChanged, StorageError

Read = Callable[[int, int, memoryview], Sequence[memoryview]]
"""`read(offset, size_bytes, scratch)` returns the bytes of a range as views, in order.

`scratch` has room for all of them unless the source is `in_memory`. It belongs to the source for the call: the source
may write anything over its first `size_bytes`, and nothing behind them. The views are memory that the source owns, or
parts of `scratch` at any place: use the views, never `scratch` itself. They are valid until the next call with
`scratch`."""


class Source(Protocol):
    """The bytes of one file to be stored."""

    @property
    def size_bytes(self) -> int:
        """The number of bytes, which does not change."""

    @property
    def payloads(self) -> Sequence[tuple[int, int]]:
        """The (offset, size_bytes) of the ranges whose blocks get digests of their own; sorted and disjoint."""

    @property
    def in_memory(self) -> bool:
        """True if reading copies nothing, so that it needs no part of the byte budget."""

    def open(self) -> AbstractContextManager[Read]:
        """Begin to read. Leaving the context checks that the source has not changed."""


@dataclass(frozen=True, slots=True)
class MemorySource:
    """Buffers that are written one after another, without a copy. Their owner keeps them alive and unchanged."""

    views: Sequence[memoryview]
    """Contiguous, of bytes (format "B")."""
    payloads: Sequence[tuple[int, int]] = ()
    in_memory: bool = True
    _ends: Sequence[int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_ends", list(accumulate(len(view) for view in self.views)))

    @property
    def size_bytes(self) -> int:
        return self._ends[-1] if self._ends else 0

    @contextmanager
    def open(self) -> Iterator[Read]:
        yield self._read

    def _read(self, offset: int, size_bytes: int, scratch: memoryview) -> Sequence[memoryview]:
        index = bisect_right(self._ends, offset)
        found: list[memoryview] = []
        while size_bytes:
            start = offset - (self._ends[index - 1] if index else 0)
            view = self.views[index][start : start + size_bytes]
            if view:
                found.append(view)
            offset, size_bytes, index = offset + len(view), size_bytes - len(view), index + 1
        return found


class FileSource(NamedTuple):
    """A local file, in the state that `of` found."""

    path: str | os.PathLike[str]
    size_bytes: int
    identity: tuple[int, int, int]
    """The device, the inode and the time of the last change in nanoseconds."""
    payloads: Sequence[tuple[int, int]] = ()

    @property
    def in_memory(self) -> bool:
        """False: it is read into a buffer."""
        return False

    @classmethod
    def of(cls, path: str | os.PathLike[str], status: os.stat_result | None = None) -> FileSource:
        """Return the source for the file at `path`, links followed."""
        status = status or os.stat(path)
        return cls(path, status.st_size, _identity(status))

    def open(self) -> AbstractContextManager[Read]:
        return _Reading(self)

    def load(self, scratch: memoryview) -> memoryview:
        """Read the whole file into `scratch`, with the checks of `open`; faster for a small file."""
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise self.not_opened(error) from error
        try:
            view = scratch[: self.size_bytes]
            count = os.readv(descriptor, (view,))
            status = os.fstat(descriptor)
        except OSError as error:
            raise self.unreadable(error) from error
        finally:
            os.close(descriptor)
        if not count == status.st_size == self.size_bytes or _identity(status) != self.identity:
            raise self.changed("changed")
        return view

    def not_opened(self, error: OSError) -> CkptstoreError:
        """Return the error for a file that cannot be opened: not readable for this user, or gone since it was listed.

        Raises StorageError where it says nothing of the file.
        """
        refuse_shortage(error, self.path)
        if isinstance(error, PermissionError):
            return self.unreadable(error)
        return self.changed(f"could not be opened ({error.strerror})")

    def unreadable(self, error: OSError) -> InvalidSource:
        """Return the error for a file that the system fails to read."""
        return InvalidSource(f"{self.path} could not be read: {error.strerror}", file=str(self.path))

    def changed(self, how: str) -> SourceChanged:
        """Return the error for a file that has changed."""
        return SourceChanged(
            f"{self.path} {how} while it was read",
            file=str(self.path),
            hint="Write checkpoint files to the end before saving them, and leave them until the save returns",
        )


class _Reading:
    """The open context of a FileSource. A class, because a generator costs as much as reading a small file."""

    __slots__ = ("_descriptor", "_source")

    def __init__(self, source: FileSource) -> None:
        self._source = source

    def __enter__(self) -> Read:
        try:
            self._descriptor = os.open(self._source.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise self._source.not_opened(error) from error
        return self._read

    def __exit__(self, failure: type[BaseException] | None, *_: object) -> None:
        try:
            if failure is None:
                status = os.fstat(self._descriptor)
                if status.st_size != self._source.size_bytes or _identity(status) != self._source.identity:
                    raise self._source.changed("changed")
        finally:
            os.close(self._descriptor)

    def _read(self, offset: int, size_bytes: int, scratch: memoryview) -> Sequence[memoryview]:
        view, done = scratch[:size_bytes], 0
        while done < size_bytes:
            try:
                count = os.preadv(self._descriptor, [view[done:] if done else view], offset + done)
            except OSError as error:
                raise self._source.unreadable(error) from error
            if count == 0:
                raise self._source.changed("ends early")
            done += count
        return [view]


def refuse_shortage(error: OSError, path: str | os.PathLike[str]) -> None:
    """Raise StorageError for an error that says nothing of the file: this process, or the system, has no room for one
    more open file."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        raise StorageError(
            f"{os.fspath(path)} could not be opened: {error.strerror}",
            file=os.fspath(path),
            hint="Raise the limit of open files (ulimit -n)",
        ) from error


def _identity(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_dev, status.st_ino, status.st_mtime_ns
