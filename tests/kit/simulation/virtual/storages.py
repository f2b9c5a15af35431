"""Storages in memory that behave as a disk, an object store, or an object store without create-if-absent.

They work perfectly; `network` adds faults on the way to them. A disk knows which bytes would survive a loss of power.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckptstore.errors import CheckpointDamaged, FileMissing, StorageError
from ckptstore.format.digest import Digest
from ckptstore.storage.base import PartWriter, Storage, StoredFile
from kit.simulation.virtual.scheduler import START_OF_TIME, Scheduler

PART_BYTES = 256
_STORAGE_AHEAD_SECONDS = 7_777.0
"""The storage's clock differs from all others."""


@dataclass(frozen=True, slots=True)
class File:
    """One stored file."""

    data: bytes
    modified_seconds: float
    version: str
    is_durable: bool = False
    """True if it survives a loss of power."""


Watcher = Callable[[str, File | None, File | None], None]
"""Called after each change with the key, the file before and the file after."""


@dataclass
class Space:
    """All files at one URI, and their watchers."""

    scheduler: Scheduler
    uri: str
    files: dict[str, File] = field(default_factory=dict)
    watchers: list[Watcher] = field(default_factory=list)
    uploads: dict[str, str] = field(default_factory=dict)
    """Unfinished uploads of parts: their ids with the key."""
    real: pathlib.Path | None = None
    """A real directory with the same files, on a disk, for programs that open paths."""
    lost_names: dict[str, File] = field(default_factory=dict)
    """On a disk, files whose removal a loss of power may undo."""
    capacity_bytes: int = 1 << 40
    num_writes: int = 0

    def now_seconds(self) -> float:
        """Return the time of the storage's clock."""
        return START_OF_TIME + _STORAGE_AHEAD_SECONDS + self.scheduler.now

    def put(self, key: str, data: bytes, *, is_durable: bool = False) -> None:
        """Set a file."""
        before = self.files.get(key)
        self.num_writes += 1
        after = File(data, self.now_seconds(), str(self.num_writes), is_durable)
        self.files.pop(key, None)
        self.files[key] = after
        self.notify(key, before, after)

    def remove(self, key: str) -> None:
        """Remove a file; a missing one is no error."""
        before = self.files.pop(key, None)
        if before is not None:
            if before.is_durable:
                self.lost_names[key] = before
            self.notify(key, before, None)

    def notify(self, key: str, before: File | None, after: File | None) -> None:
        """Notify the watchers, and update the real directory."""
        if self.real is not None:
            path = self.real / key
            if after is None:
                path.unlink(missing_ok=True)
            else:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(after.data)
        for watcher in self.watchers:
            watcher(key, before, after)

    def get(self, key: str) -> File:
        """Return a file. Raises FileMissing."""
        try:
            return self.files[key]
        except KeyError:
            raise FileMissing(f"There is no {key} in {self.uri}", file=key) from None

    def used_bytes(self) -> int:
        """Return the bytes of all files."""
        return sum(len(file.data) for file in self.files.values())

    def lose_power(self, survives: Callable[[str], float]) -> None:
        """Keep only durable files for sure; `survives` returns a number from 0 to 1 for a key."""
        for key, file in [*self.files.items()]:
            if file.is_durable:
                continue
            fate = survives(key)
            if fate < 0.4:
                self._afterwards(key, None)
            elif fate < 0.6:
                half = File(file.data[: len(file.data) // 2], file.modified_seconds, file.version + "t")
                self._afterwards(key, half)
        for key, file in self.lost_names.items():
            if key not in self.files and survives(key) < 0.3:
                self._afterwards(key, file)
        self.lost_names.clear()

    def _afterwards(self, key: str, file: File | None) -> None:
        before = self.files.pop(key, None)
        if file is not None:
            self.files[key] = file
        self.notify(key, before, file)


class _Plain(Storage):
    """The seven verbs."""

    durable_at_once = True

    def __init__(self, space: Space) -> None:
        self.space = space

    @property
    def uri(self) -> str:
        return self.space.uri

    def __repr__(self) -> str:
        return f"<{self.uri}>"

    def write(self, key: str, views: Sequence[memoryview]) -> None:
        self.space.put(key, b"".join(views), is_durable=self.durable_at_once)

    def read(self, key: str) -> bytes:
        return self.space.get(key).data

    def read_into(self, key: str, offset: int, views: Sequence[memoryview], *, version: str | None = None) -> None:
        file = self.space.get(key)
        if version is not None and version != file.version:
            raise CheckpointDamaged(f"{key} changed while it was read", file=key)
        if offset + sum(map(len, views)) > len(file.data):
            raise CheckpointDamaged(f"{key} has {len(file.data)} bytes only", file=key)
        for view in views:
            view[:] = file.data[offset : offset + len(view)]
            offset += len(view)

    def stat(self, key: str) -> StoredFile:
        return _shown(key, self.space.get(key))

    def list(self, prefix: str) -> Iterator[StoredFile]:
        found = [_shown(key, file) for key, file in self.space.files.items() if key.startswith(prefix)]
        return iter(found[::-1])

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            self.space.remove(key)

    def close(self) -> None:
        """Do nothing: no resources are held."""


def _shown(key: str, file: File) -> StoredFile:
    return StoredFile(key, len(file.data), file.modified_seconds, file.version)


class _Creates(_Plain):
    def create(self, key: str, data: bytes) -> bool:
        if key in self.space.files:
            return False
        self.space.put(key, bytes(data), is_durable=True)
        return True


class _Parts(_Plain):
    def part_bytes(self, size_bytes: int) -> int:
        return PART_BYTES

    def open_parts(self, key: str, size_bytes: int) -> PartWriter:
        return _Writer(self, key, size_bytes)


class _Writer:
    def __init__(self, storage: _Plain, key: str, size_bytes: int) -> None:
        self._storage = storage
        self._key = key
        self._size_bytes = size_bytes
        self._parts: dict[int, bytes] | None = {}
        self._is_finished = False
        space = storage.space
        space.num_writes += 1
        self._id = f"upload-{space.num_writes}"
        space.uploads[self._id] = key

    def write_part(self, offset: int, views: Sequence[memoryview], digest: Digest | None = None) -> None:
        self._open()[offset] = b"".join(views)

    def finish(self) -> None:
        if self._is_finished:  # and the reply was lost
            return
        parts = self._open()
        data = b"".join(parts[offset] for offset in sorted(parts))
        if len(data) != self._size_bytes:
            raise StorageError(f"{self._key} lacks parts", file=self._key)
        self._storage.space.put(self._key, data, is_durable=self._storage.durable_at_once)
        self._is_finished = True
        self.abort()

    def abort(self) -> None:
        self._parts = None
        self._storage.space.uploads.pop(self._id, None)

    def _open(self) -> dict[int, bytes]:
        if self._parts is None or self._id not in self._storage.space.uploads:
            raise StorageError(f"The upload of {self._key} is finished or aborted", file=self._key)
        return self._parts


class _Copies(_Plain):
    def copy(self, source_key: str, key: str) -> None:
        self.space.put(key, self.space.get(source_key).data, is_durable=self.durable_at_once)

    def copy_from(self, source: Storage, source_key: str, key: str) -> bool:
        inner: Any = getattr(source, "inner", source)
        if not isinstance(inner, _Plain):
            return False
        self.space.put(key, inner.space.get(source_key).data, is_durable=self.durable_at_once)
        return True


class _Bucket(_Plain):
    def rules(self) -> Mapping[str, str]:
        """Return no rules."""
        return {}

    def unfinished(self, prefix: str) -> Sequence[tuple[str, str]]:
        return [(key, upload_id) for upload_id, key in self.space.uploads.items() if key.startswith(prefix)]

    def abort_unfinished(self, key: str, upload_id: str) -> None:
        self.space.uploads.pop(upload_id, None)


class _Disk(_Plain):
    durable_at_once = False

    @property
    def uri(self) -> str:
        """A path: no server is involved."""
        return f"/{self.space.uri.replace('://', '/')}"

    def persist(self, keys: Sequence[str]) -> None:
        files = self.space.files
        for key in keys:
            if key in files:
                file = files[key]
                files[key] = File(file.data, file.modified_seconds, file.version, True)
            elif not (self._real / key).is_dir():
                raise FileMissing(f"There is no {key} to make durable", file=key)

    def free_bytes(self) -> int:
        return max(0, self.space.capacity_bytes - self.space.used_bytes())

    def local_path(self, key: str) -> pathlib.Path:
        return self._real / key if key else self._real

    def make_directory(self, key: str) -> None:
        (self._real / key).mkdir(parents=True, exist_ok=True)

    def remove_directories(self, key: str) -> None:
        for directory, _, _ in os.walk(self._real / key, topdown=False):
            with contextlib.suppress(OSError):
                os.rmdir(directory)

    def remove_unfinished(self, key: str, *, before_seconds: float, dry_run: bool = False) -> Sequence[str]:
        """Remove nothing: a simulated write is whole or did not happen."""
        return ()

    @property
    def _real(self) -> pathlib.Path:
        assert self.space.real is not None
        return self.space.real

    def link(self, files: Sequence[tuple[str | os.PathLike[str], str]]) -> Sequence[bool]:
        for path, key in files:
            self.space.put(key, pathlib.Path(path).read_bytes())
        return [True] * len(files)

    def read_steps(
        self,
        key: str,
        offset: int,
        steps: Sequence[Sequence[memoryview]],
        accept: Callable[[int], bool],
        *,
        version: str | None = None,
    ) -> None:
        for number, views in enumerate(steps):
            self.read_into(key, offset, views, version=version)
            while not accept(number):
                self.read_into(key, offset, views, version=version)
            offset += sum(map(len, views))

    def write_many(self, files: Sequence[tuple[str, Sequence[memoryview]]]) -> None:
        for key, views in files:
            self.write(key, views)

    def overwrite(self, key: str, data: bytes) -> None:
        self.write(key, [memoryview(data)])

    def useful_threads(self) -> int:
        return 2


class ObjectStore(_Creates, _Parts, _Bucket):
    """An object store with create-if-absent."""


class PlainObjectStore(_Parts):
    """An object store without create-if-absent: one job at a time, by a promise."""


class DiskStore(_Creates, _Parts, _Copies, _Disk):
    """A disk that all processes see."""


KINDS: dict[str, Callable[[Space], Any]] = {
    "objects": ObjectStore,
    "plain objects": PlainObjectStore,
    "disk": DiskStore,
}
"""The storages of a run, by name."""
