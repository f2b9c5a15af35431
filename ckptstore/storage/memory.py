"""A storage in the memory of this process, for tests, examples and notebooks.

`memory://name` is one dictionary for each name and process: all storages of one name have the same files, and
`memory://name/below` has those under "below/". It has the powers of an object store (create-if-absent, parts, copies)
and none of a disk. Files live until they are deleted or the process ends; no other process ever sees them.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from ckptstore.errors import CheckpointDamaged, FileMissing, InvalidInput, StorageError
from ckptstore.format.digest import Digest
from ckptstore.storage.base import PartWriter, ProcessBound, StoredFile
from ckptstore.storage.uri import parse_uri

_PART_BYTES = 1 << 20
"""Small, so that quick tests go through parts."""


@dataclass(frozen=True, slots=True)
class _File:
    data: bytes
    modified_seconds: float
    version: str


@dataclass(slots=True)
class _Space:
    """All files of one name."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    files: dict[str, _File] = field(default_factory=dict)
    writes: int = 0

    def put(self, path: str, data: bytes) -> None:
        """Set a file; the caller holds the lock."""
        self.writes += 1
        self.files[path] = _File(data, time.time(), str(self.writes))


_spaces: dict[str, _Space] = {}


def _after_fork() -> None:
    """Give a forked child, which has copies of the spaces, locks of its own."""
    for space in _spaces.values():
        space.lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


class MemoryStorage(ProcessBound):
    """The files of one `memory://` URI. Safe for threads; refuses to travel to another process.

    Writes are atomic: a reader sees the old contents or the new ones.
    """

    def __init__(self, uri: str) -> None:
        """Open the space, created empty on its first use. Raises InvalidInput for a URI without a name."""
        location = parse_uri(uri)
        super().__init__(location.uri)
        if location.scheme != "memory":
            raise InvalidInput(f"{location.uri!r} names no memory storage", hint='Give "memory://" and a name')
        self._prefix = location.full_key("")
        self._space = _spaces.setdefault(location.container, _Space())  # atomic, as dictionaries of Python are

    def __reduce__(self) -> NoReturn:
        raise InvalidInput(
            f"{self._uri} exists in this process alone and cannot be sent to another one",
            hint="Use a directory or an object store for several processes",
        )

    def write(self, key: str, views: Sequence[memoryview]) -> None:
        self._put(key, b"".join(views))

    def read(self, key: str) -> bytes:
        return self._file(key).data

    def read_into(self, key: str, offset: int, views: Sequence[memoryview], *, version: str | None = None) -> None:
        file = self._file(key)
        if version is not None and version != file.version:
            raise CheckpointDamaged(f"{key} of {self._uri} changed while it was read", file=key)
        end = offset + sum(len(view) for view in views)
        if end > len(file.data):
            raise CheckpointDamaged(
                f"{key} of {self._uri} has {len(file.data)} bytes, {end} were expected at least", file=key
            )
        data = memoryview(file.data)
        for view in views:
            view[:] = data[offset : offset + len(view)]
            offset += len(view)

    def stat(self, key: str) -> StoredFile:
        return _stored(key, self._file(key))

    def list(self, prefix: str) -> Iterator[StoredFile]:
        self.check_process()
        start, cut = self._prefix + prefix, len(self._prefix)
        with self._space.lock:
            found = [(path, file) for path, file in self._space.files.items() if path.startswith(start)]
        # Newest first: callers that rely on an order that no storage promises fail here, not in production.
        return (_stored(path[cut:], file) for path, file in reversed(found))

    def delete(self, keys: Sequence[str]) -> None:
        self.check_process()
        with self._space.lock:
            for key in keys:
                self._space.files.pop(self._prefix + key, None)

    def close(self) -> None:
        """Do nothing; the files stay."""

    def create(self, key: str, data: bytes) -> bool:
        self.check_process()
        path = self._prefix + key
        with self._space.lock:
            if path in self._space.files:
                return False
            self._space.put(path, bytes(data))
            return True

    def part_bytes(self, size_bytes: int) -> int:
        return _PART_BYTES

    def open_parts(self, key: str, size_bytes: int) -> PartWriter:
        self.check_process()
        return _MemoryParts(self, key, size_bytes)

    def copy(self, source_key: str, key: str) -> None:
        self._put(key, self._file(source_key).data)

    def _put(self, key: str, data: bytes) -> None:
        self.check_process()
        with self._space.lock:
            self._space.put(self._prefix + key, data)

    def _file(self, key: str) -> _File:
        self.check_process()
        with self._space.lock:
            file = self._space.files.get(self._prefix + key)
        if file is None:
            raise FileMissing(f"There is no {key} in {self._uri}", file=key)
        return file


class _MemoryParts:
    """Parts of one file; invisible until `finish`."""

    def __init__(self, storage: MemoryStorage, key: str, size_bytes: int) -> None:
        self._storage = storage
        self._key = key
        self._size_bytes = size_bytes
        self._lock = threading.Lock()
        self._parts: dict[int, bytes] | None = {}

    def write_part(self, offset: int, views: Sequence[memoryview], digest: Digest | None = None) -> None:
        data = b"".join(views)
        expected_bytes = min(_PART_BYTES, self._size_bytes - offset)
        if offset % _PART_BYTES or len(data) != expected_bytes:
            raise StorageError(f"{len(data)} bytes at {offset} are no part of {self._key}", file=self._key)
        with self._lock:
            if self._parts is None:
                raise self._ended()
            self._parts[offset] = data

    def finish(self) -> None:
        with self._lock:
            if self._parts is None:
                raise self._ended()
            missing = sorted(set(range(0, self._size_bytes, _PART_BYTES)) - self._parts.keys())
            if missing:
                raise StorageError(f"{self._key} lacks the parts at {missing[:5]}", file=self._key)
            data = b"".join(self._parts[offset] for offset in sorted(self._parts))
            self._parts = None
        self._storage.write(self._key, [memoryview(data)])

    def abort(self) -> None:
        with self._lock:
            self._parts = None

    def _ended(self) -> StorageError:
        return StorageError(f"The parts of {self._key} were finished or aborted already", file=self._key)


def _stored(key: str, file: _File) -> StoredFile:
    return StoredFile(key, len(file.data), file.modified_seconds, file.version)
