"""The contract of a storage: seven verbs over keys, methods with a default, and protocols for further powers.

A key is a relative POSIX path below the storage's root ("log/0000000042.json"); `layout.check_name` has the rules. A
storage is safe to use from several threads and belongs to one process; it is pickled as URI and options.

Every storage must have read-after-write (a `write` that returned is seen by every later `read`, `stat` and `list`, from
any process), ranged reads and listing by prefix. It needs no order of a listing, no rename and no directories. Errors
come as `FileMissing`, `AccessDenied`, `StorageFull`, `StorageUnavailable` (worth a retry) or `StorageError`, and name
the key. A back-end retries nothing itself: `ckptstore.storage.retry` does, around it.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

from ckptstore.errors import FileMissing, StorageError, StorageUnavailable
from ckptstore.format.digest import Digest
from ckptstore.runtime.parallel import mapped

MAY_NOT_LIST = (
    "Check the permissions; without the one to list the bucket, S3 also answers 403 for a file that is not there"
)
"""The hint of a refusal to somebody whose credentials are known."""


class Unsupported(StorageError):
    """The server or the file system does not know such an operation, create-if-absent for one."""


class UploadGone(StorageError):
    """An upload in parts that is not finished is gone, or some of its parts: somebody has aborted it. Its file can be
    written from the beginning."""


class Shortage(StorageUnavailable):
    """This process, or the system, has no descriptor or no memory left. That is no fault of a file, and another try of
    the same process soon is no help."""

    retryable = False


class StoredFile(NamedTuple):
    """One file as a listing or `stat` shows it."""

    key: str
    size_bytes: int
    modified_seconds: float
    """The time of the last write, in seconds since the epoch by the storage's own clock, never this machine's."""
    version: str | None = None
    """An opaque mark of these exact contents (an ETag or generation), None if there is none."""


@runtime_checkable
class Storage(Protocol):
    """The seven verbs, and methods with a default. A back-end inherits from it."""

    @property
    @abstractmethod
    def uri(self) -> str:
        """The root, without user info, query or any other secret."""

    @abstractmethod
    def write(self, key: str, views: Sequence[memoryview]) -> None:
        """Write the views' bytes, one after another, to the file; an existing one is replaced.

        The file may be visible, and torn, before this returns. It is durable when this returns, except on a storage
        that is a `Disk`. The views are not kept.
        """

    @abstractmethod
    def read(self, key: str) -> bytes:
        """Return the bytes of a whole, small file. Raises FileMissing."""

    @abstractmethod
    def read_into(self, key: str, offset: int, views: Sequence[memoryview], *, version: str | None = None) -> None:
        """Fill the views, one after another, with the bytes from `offset` on.

        Raises CheckpointDamaged if the file ends before the views are full, or has another version than `version`,
        unless that is None. The views may hold anything after an error.
        """

    @abstractmethod
    def stat(self, key: str) -> StoredFile:
        """Return the facts about one file. Raises FileMissing."""

    @abstractmethod
    def list(self, prefix: str) -> Iterator[StoredFile]:
        """Yield every file whose key starts with `prefix` (a plain string prefix), in no order."""

    @abstractmethod
    def delete(self, keys: Sequence[str]) -> None:
        """Remove files; missing ones are no error."""

    @abstractmethod
    def close(self) -> None:
        """Close the connections. The storage must not be used afterwards."""

    def read_if_there(self, key: str) -> bytes | None:
        """Return the bytes of a whole, small file; None if there is none."""
        with suppress(FileMissing):
            return self.read(key)
        return None

    def doubt(self, key: str, offset: int = 0, size_bytes: int | None = None) -> None:
        """Have later reads come in another way, by new connections or past a cache, since the bytes read of a stretch
        of a file, or of all of it, were not those expected. Reads nothing, raises nothing. A storage with one way alone
        does nothing."""
        return

    def resolved(self) -> Mapping[str, str]:
        """Return the settings of a service that are in effect, with the source of each in words, without any secret.
        Asks no server."""
        return {}

    def persist(self, keys: Sequence[str]) -> None:
        """Make these files, and the directories that lead to them, durable: they would survive a loss of power. On a
        storage that is no `Disk` they are already.

        After an error the state of the files is unknown: write them again (a second fsync may lie about the first).
        """
        return

    def free_bytes(self) -> int | None:
        """Return the bytes that can still be written, None if nothing limits them."""
        return None

    def make_directory(self, key: str) -> None:
        """Create a directory and its parents, on a storage that has directories; an existing one is no error."""
        return

    def remove_directories(self, key: str) -> None:
        """Remove the directory and all empty ones below it; one with a file in it stays. Best effort."""
        return


class ProcessBound(Storage):
    """A base for back-ends, by which a storage refuses to work in a forked child, where it would unknowingly share
    connections, locks or memory with its parent."""

    def __init__(self, uri: str) -> None:
        self._uri = uri
        self._process_id = os.getpid()

    @property
    def uri(self) -> str:
        return self._uri

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._uri!r})"

    @property
    def is_here(self) -> bool:
        """True in the process that opened the storage."""
        return os.getpid() == self._process_id

    def check_process(self) -> None:
        """Raise StorageError in a process other than the one that opened the storage."""
        if not self.is_here:
            raise StorageError(
                f"A storage that was opened in process {self._process_id} is used in its fork {os.getpid()}",
                hint="Open the store again in that process, or start it with spawn",
            )


@cache
def _has_methods(family: type, power: Any) -> bool:
    return all(getattr(family, name, None) is not None for name in methods_of(power))  # as typing does it


class _OfPower(type(Protocol)):  # type: ignore[misc]
    def __instancecheck__(cls, instance: object) -> bool:
        asked: tuple[Any, Any] = type(instance), cls
        return _has_methods(*asked)  # what typing does takes a tenth of a millisecond, each time


class Power(Protocol, metaclass=_OfPower):
    """A base for the optional powers. A storage has a power if its class has all methods of it."""


@runtime_checkable
class CreatesExclusively(Power, Protocol):
    """Create-if-absent, on which commits rely."""

    def create(self, key: str, data: bytes) -> bool:
        """Create the file whole and durable, and return True; if it exists, change nothing and return False.

        Exactly one of several callers at once, each with bytes of its own, gets True, and no reader ever sees a part of
        the file. After an error it may have been created or not: the caller reads it back. Raises Unsupported, and
        creates nothing, where only the server or the file system lacks this.
        """


def create_if_able(storage: Storage, key: str, data: bytes) -> bool | None:
    """Return the result of `create`, None where the storage cannot create-if-absent: then nothing is created."""
    if isinstance(storage, CreatesExclusively):
        with suppress(Unsupported):
            return storage.create(key, data)
    return None


class PartWriter(Protocol):
    """A file that is being written in parts, from several threads, in any order."""

    def write_part(self, offset: int, views: Sequence[memoryview], digest: Digest | None = None) -> None:
        """Write one part. Parts start at multiples of the storage's `part_bytes` and have that size, except the last.

        `digest` is that of the views, if it is known: a storage that sends one along need not compute it.
        """

    def finish(self) -> None:
        """Make the file visible with all its parts, as durable as after `write`. Called after all parts, and again
        after a passing error: if the first call has taken effect, the second does nothing."""

    def abort(self) -> None:
        """Drop the written parts, as far as the storage can. Never raises; may follow a failed `finish`."""


@runtime_checkable
class WritesParts(Power, Protocol):
    """Large files in parallel parts."""

    def part_bytes(self, size_bytes: int) -> int:
        """Return the part size for a file of that size; a file no larger than one part goes through `write`."""

    def open_parts(self, key: str, size_bytes: int) -> PartWriter:
        """Begin a file of exactly that size."""


@runtime_checkable
class Disk(Power, Protocol):
    """A disk, or a file system that machines share. Its files have paths, are durable once `persist` has returned, and
    are read-only from the start, for everybody, but for those of `overwrite`."""

    def local_path(self, key: str) -> Path:
        """Return the path of a key ("" is the root). Creates nothing."""

    def remove_unfinished(self, key: str, *, before_seconds: float, dry_run: bool = False) -> Sequence[str]:
        """Remove from a directory ("" is the root) the files that killed writers left, if they were last changed before
        that time by the storage's clock; with `dry_run` only find them. Return their keys, which no listing shows."""

    def link(self, files: Sequence[tuple[str | os.PathLike[str], str]]) -> Sequence[bool]:
        """Make each key another name of the inode of its path, or a reflink; return False for those where neither is
        possible. No path may be that of a symbolic link. After an error any of the keys may exist."""

    def read_steps(
        self,
        key: str,
        offset: int,
        steps: Sequence[Sequence[memoryview]],
        accept: Callable[[int], bool],
        *,
        version: str | None = None,
    ) -> None:
        """Do as `read_into` does, for the views of one step after another. `accept` is called with the number of each
        step as it is filled, while its bytes are in the processor's cache. A step that it does not accept is read
        again."""

    def write_many(self, files: Sequence[tuple[str, Sequence[memoryview]]]) -> None:
        """Write the views of each key as `write` does, in less time. After an error any of them may be written."""

    def overwrite(self, key: str, data: bytes) -> None:
        """Write a file in place: its old bytes are replaced where they lie. For hints alone: readers, and everybody
        after a crash, may find any mixture of both."""

    def useful_threads(self) -> int:
        """Return the most threads that are useful for writing small files; more only wait for each other."""


@runtime_checkable
class CopiesInside(Power, Protocol):
    """Copies inside the storage, without moving bytes through this process."""

    def copy(self, source_key: str, key: str) -> None:
        """Copy a file within the storage; raises FileMissing."""


@runtime_checkable
class CopiesFrom(Power, Protocol):
    """Copies from another storage of the same provider, without moving bytes through this process."""

    def copy_from(self, source: Storage, source_key: str, key: str) -> bool:
        """Copy a file of `source` and return True; do nothing and return False if its bytes would have to be read and
        written. As durable as after `write`. Raises FileMissing."""


@runtime_checkable
class Bucket(Power, Protocol):
    """A bucket, which has its own rules for deleted files, unfinished uploads and damage in transit, and where
    unfinished uploads in parts keep costing money."""

    def rules(self) -> Mapping[str, str]:
        """Return the rules for "versioning", "soft delete", "object lock", "unfinished uploads" and "upload checksum",
        in words; "" for one that is off. Unknown ones are left out."""

    def unfinished(self, prefix: str) -> Sequence[tuple[str, str]]:
        """Return (key, upload id) of every unfinished upload below the prefix; none if uploads leave nothing behind."""

    def abort_unfinished(self, key: str, upload_id: str) -> None:
        """Drop one; no error if it is gone."""


POWERS: tuple[type, ...] = (CreatesExclusively, WritesParts, Disk, CopiesInside, CopiesFrom, Bucket)
"""Every optional power."""


def methods_of(protocol: type) -> frozenset[str]:
    """Return the names of the methods of a power, or of the verbs and `uri` for `Storage`."""
    return frozenset(name for name in vars(protocol) if not name.startswith("_"))


def adopt(storage: Storage, moves: Sequence[tuple[str, str]], *, num_threads: int) -> list[tuple[str, str]]:
    """Give each source key a target key too: a hard link on a disk, else a copy inside the storage.

    Return the moves that this storage can only make by a download and an upload; they are left to the caller. What is
    linked or copied is durable after `Storage.persist`. Raises FileMissing.
    """
    left = list(moves)
    if isinstance(storage, Disk):
        linked = storage.link([(storage.local_path(source), target) for source, target in moves])
        left = [move for move, is_linked in zip(moves, linked, strict=True) if not is_linked]
    if not left or not isinstance(storage, CopiesInside):
        return left
    mapped(lambda move: storage.copy(*move), left, num_threads=num_threads, name="ckptstore-adopt")
    return []
