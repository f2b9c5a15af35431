"""The contract of a storage: seven verbs over keys, four that only a disk needs, and protocols for further powers.

A key is a relative POSIX path below the storage's root ("log/0000000042.json"); `layout.check_key` says what is legal.
A storage is safe to use from several threads and belongs to one process; it is pickled as URI and options and connects
again in the new process.

What is asked of every storage: read-after-write (a `write` that returned is seen by every later `read`, `stat` and
`list`, from any process), ranged reads, listing by prefix. No order of a listing, no rename, no directories.

Errors come as `FileMissing`, `AccessDenied`, `StorageFull`, `StorageUnavailable` (worth a retry) or `StorageError`,
and name the key. A storage retries nothing itself: `ckptstore.storage.retry` does, above it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

from ckptstore.errors import StorageError
from ckptstore.format.digest import Digest


class StoredFile(NamedTuple):
    """One file as a listing or `stat` shows it."""

    key: str
    size_bytes: int
    modified_seconds: float
    """When it was last written, in seconds since the epoch by the storage's own clock, never this machine's."""
    version: str | None = None
    """An opaque mark of these exact contents (an ETag or generation), None where there is none."""


@runtime_checkable
class Storage(Protocol):
    """The seven verbs, and four that do nothing on a storage which is no disk. A back-end inherits it."""

    @property
    def uri(self) -> str:
        """The root, without user info, query or any other secret."""

    def write(self, key: str, views: Sequence[memoryview]) -> None:
        """Make the file hold the views' bytes, one after another; whatever was there is replaced.

        The file may be visible, and torn, before this returns. It is durable when this returns, except on a storage
        which is a `Disk`. The views are not kept.
        """

    def read(self, key: str) -> bytes:
        """The whole file. For small objects; raises FileMissing."""

    def read_into(self, key: str, offset: int, views: Sequence[memoryview], *, version: str | None = None) -> None:
        """Fill the views, one after another, with the bytes from `offset` on.

        Raises CheckpointDamaged when the file ends before the views are full, or when `version` is given and the file
        has another one. The views may hold anything after an error.
        """

    def stat(self, key: str) -> StoredFile:
        """One file; raises FileMissing."""

    def list(self, prefix: str) -> Iterator[StoredFile]:
        """Every file whose key starts with `prefix` (a plain string prefix), in no order. Empty if there is none."""

    def delete(self, keys: Sequence[str]) -> None:
        """Remove files; those that are not there are no error."""

    def close(self) -> None:
        """Give back connections. The storage is not used afterwards."""

    def persist(self, keys: Sequence[str]) -> None:
        """Return when these files, and the directories that lead to them, would survive a loss of power. On a storage
        which is no `Disk` they do already.

        After an error the state of the files is unknown: write them anew (a second fsync may lie about the first).
        """
        return

    def free_bytes(self) -> int | None:
        """Return how much can still be written, None where nothing limits it."""
        return None

    def make_directory(self, key: str) -> None:
        """Create a directory and its parents, where there are any; one that exists is no error."""
        return

    def remove_directories(self, key: str) -> None:
        """Remove the directory and all empty ones below it; one with a file in it stays. Best effort."""
        return


class ProcessBound(Storage):
    """For back-ends: a storage that was opened here and is used in a forked child says so, instead of sharing
    connections, locks or memory with its parent without either knowing."""

    def __init__(self) -> None:
        self._process_id = os.getpid()

    @property
    def is_here(self) -> bool:
        """Whether this is the process that opened the storage."""
        return os.getpid() == self._process_id

    def check_process(self) -> None:
        """Raise StorageError in a process other than the one that opened the storage."""
        if not self.is_here:
            raise StorageError(
                f"A storage that was opened in process {self._process_id} is used in its fork {os.getpid()}",
                hint="Open the store again in that process, or start it with spawn",
            )


@runtime_checkable
class CreatesExclusively(Protocol):
    """Create-if-absent: what commits rest on."""

    def create(self, key: str, data: bytes) -> bool:
        """Create the file whole and durable, and return True; return False if it exists, and change nothing.

        Of several callers at once exactly one gets True, and no reader ever sees a part of the file. An error may
        leave it created or not: the caller reads back.
        """


class PartWriter(Protocol):
    """A file that is being written in parts, from several threads, in any order."""

    def write_part(self, offset: int, views: Sequence[memoryview], digest: Digest | None = None) -> None:
        """Write one part. Parts start at multiples of the storage's `part_bytes` and have that size, but the last.

        `digest` is that of the views, where it is known: a storage that sends one along need not compute it.
        """

    def finish(self) -> None:
        """Make the file visible with all its parts; durable as `write` is. Called after all parts, and again after an
        error that may pass: where the first call has taken effect, the second does nothing."""

    def abort(self) -> None:
        """Drop what was written, as far as the storage can. Never raises; may follow a failed `finish`."""


@runtime_checkable
class WritesParts(Protocol):
    """Large files in parallel parts."""

    def part_bytes(self, size_bytes: int) -> int:
        """The part size for a file of that size; a file that is not larger than one part goes through `write`."""

    def open_parts(self, key: str, size_bytes: int) -> PartWriter:
        """Begin a file of exactly that size."""


@runtime_checkable
class Disk(Storage, Protocol):
    """A disk, or a file system that machines share. Its files have paths, are durable when `persist` has returned, and
    are read-only from the start, for everybody."""

    def local_path(self, key: str) -> Path:
        """The path of a key ("" is the root). Nothing is created."""

    def remove_unfinished(self, key: str, *, before_seconds: float, dry_run: bool = False) -> Sequence[str]:
        """Remove from a directory ("" is the root) what writers that were killed have left, where it was last changed
        before that time by the storage's clock. Gives their keys, which no listing shows."""

    def link(self, files: Sequence[tuple[str | os.PathLike[str], str]]) -> Sequence[bool]:
        """For each path and key, make the key another name of the same inode, or a reflink; False where neither is
        possible. No path may be that of a symbolic link. After an error any of them may be there."""

    def read_steps(
        self,
        key: str,
        offset: int,
        steps: Sequence[Sequence[memoryview]],
        accept: Callable[[int], bool],
        *,
        version: str | None = None,
    ) -> None:
        """The same as `read_into` for the views of one step after another. `accept` is called with the number of each
        step as it is filled, while its bytes are in the processor's cache. A step that it does not accept is read
        again."""

    def write_many(self, files: Sequence[tuple[str, Sequence[memoryview]]]) -> None:
        """The same as `write` for each key and its views, in less time. After an error any of them may be written."""

    def useful_threads(self) -> int:
        """How many threads that write small files at once are of use; more of them only wait for each other."""


@runtime_checkable
class CopiesInside(Protocol):
    """A copy that does not travel through this process."""

    def copy(self, source_key: str, key: str) -> None:
        """Copy a file within the storage; raises FileMissing."""


@runtime_checkable
class CopiesFrom(Protocol):
    """A copy from another storage that does not travel through this process, where both are at one provider."""

    def copy_from(self, source: Storage, source_key: str, key: str) -> bool:
        """Copy a file of `source`, or return False, and do nothing, where only bytes that are read and written get
        from there to here. Durable as `write` is. Raises FileMissing."""


@runtime_checkable
class Bucket(Protocol):
    """A bucket, which has rules of its own for what is deleted, never finished, or damaged on its way, and where
    uploads in parts that were never finished keep costing money."""

    def rules(self) -> Mapping[str, str]:
        """Of "versioning", "soft delete", "object lock", "unfinished uploads" and "upload checksum" what there is, in
        words; "" for what there is not. What is left out is not known."""

    def unfinished(self, prefix: str) -> Sequence[tuple[str, str]]:
        """(key, upload id) of every unfinished upload below the prefix; nothing where uploads leave nothing behind."""

    def abort_unfinished(self, key: str, upload_id: str) -> None:
        """Drop one; no error if it is gone."""


@runtime_checkable
class Doubts(Protocol):
    """A storage that can be read in another way than the last one: by new connections, past a cache, elsewhere."""

    def doubt(self, key: str, offset: int = 0, size_bytes: int | None = None) -> None:
        """What was read of a stretch of a file, or of all of it, was not what it should be: what is read from now on
        comes in another way. Nothing is read here, and nothing is raised."""


@runtime_checkable
class Configured(Protocol):
    """A service that options, variables and files say how to reach."""

    def resolved(self) -> Mapping[str, str]:
        """What they say, each with what says it, in words, without any secret. Nothing is asked of any server."""


POWERS: tuple[type, ...] = (CreatesExclusively, WritesParts, Disk, CopiesInside, CopiesFrom, Bucket, Configured, Doubts)
"""Every optional power. A storage has a power when it has all its methods; some of them count for nothing."""


def methods_of(protocol: type) -> frozenset[str]:
    """The names of what a storage with this power has, or of the verbs and `uri` for `Storage`."""
    return frozenset(name for name in vars(protocol) if not name.startswith("_"))
