"""Sources: bytes that wait to be written, from memory or from a file. No torch here.

A source is read in ranges, by several threads at once. It says which of its ranges are payloads: those get a digest for
each block of 1 MiB beside the digest of the whole file (`ckptstore.format.digest`).
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple, Protocol

from ckptstore.errors import InvalidSource, SourceChanged

Read = Callable[[int, int, memoryview], Sequence[memoryview]]
"""`read(offset, size_bytes, scratch)` gives the bytes of a range as views, in order.

`scratch` has room for all of them unless the source is `in_memory`. It belongs to the source for the call: the source
may write anything over its first `size_bytes`, and nothing behind them. The views are memory that the source owns or
parts of `scratch`, wherever in it. So what lies in `scratch` afterwards means nothing by its place: the bytes are those
of the views. They are valid until `scratch` is given to another call."""


class Source(Protocol):
    """What becomes one stored file."""

    @property
    def size_bytes(self) -> int:
        """How many bytes there are. It does not change."""

    @property
    def payloads(self) -> Sequence[tuple[int, int]]:
        """(offset, size_bytes) of the ranges whose blocks get digests of their own; sorted, apart from each other."""

    @property
    def in_memory(self) -> bool:
        """Whether reading copies nothing, so that no part of the byte budget is needed for it."""

    def open(self) -> AbstractContextManager[Read]:
        """Begin to read. Leaving the context checks that the source is still what it was."""


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
    """A local file, as it was when `of` looked at it."""

    path: str | os.PathLike[str]
    size_bytes: int
    identity: tuple[int, int, int]
    """Device, inode and time of the last change in nanoseconds."""
    payloads: Sequence[tuple[int, int]] = ()

    @property
    def in_memory(self) -> bool:
        """It is read into a buffer."""
        return False

    @classmethod
    def of(cls, path: str | os.PathLike[str], status: os.stat_result | None = None) -> FileSource:
        """The file at `path`, links followed."""
        status = status or os.stat(path)
        return cls(path, status.st_size, _identity(status))

    def open(self) -> AbstractContextManager[Read]:
        return _Reading(self)

    def load(self, scratch: memoryview) -> memoryview:
        """The whole file, read into `scratch`; what `open` does for a small file, in less time."""
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise self.changed(f"could not be opened ({error.strerror})") from error
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

    def unreadable(self, error: OSError) -> InvalidSource:
        """The error for a file that the system does not give."""
        return InvalidSource(f"{self.path} could not be read: {error.strerror}", file=str(self.path))

    def changed(self, how: str) -> SourceChanged:
        """The error for a file that is not what it was."""
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
            raise self._source.changed(f"could not be opened ({error.strerror})") from error
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


def _identity(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_dev, status.st_ino, status.st_mtime_ns
