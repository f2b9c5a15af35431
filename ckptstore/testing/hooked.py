"""Put a hook around every call of a storage, in a class with exactly the powers of the storage inside."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar

from ckptstore.errors import StorageError
from ckptstore.format.digest import Digest
from ckptstore.storage import base
from ckptstore.storage.base import PartWriter, Storage, StoredFile

T = TypeVar("T")
Views = Sequence[memoryview]


VERBS = frozenset(
    {"write", "read", "read_into", "stat", "list", "delete", "close", "create", "open_parts", "write_part", "finish"}
    | {"abort", "persist", "free_bytes", "make_directory", "remove_directories", "remove_unfinished", "link", "copy"}
    | {"write_many", "copy_from", "rules", "unfinished", "abort_unfinished"}
)
"""The verbs of all calls, of storages with any powers."""


def _nothing() -> None:
    """Do nothing for half of a call that must be whole or not happen."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a storage, before it reaches the storage inside and again after it returned."""

    verb: str
    """The method: "write", "read_into", "create", ..., and of a part writer "write_part", "finish" and "abort"."""
    key: str
    """The key, the prefix of a listing, or the first of several keys."""
    index: int
    """The number of calls of this wrapper before, over all threads; the same before and after."""
    phase: Literal["before", "after"]
    size_bytes: int = 0
    """Bytes of the payload, as far as they are known: those of a `read` only after it."""
    num_keys: int = 1
    do_half: Callable[[], object] = field(default=_nothing, compare=False, repr=False)
    """Performs a part of the call in the storage inside. Does nothing for calls that must be whole or not happen."""


Hook = Callable[[Call], None]
"""Called before and after each call, on the caller's thread. The caller gets its exceptions: raised before, the call
has no effect; raised after, it has its effect and the reply is lost. A call that fails has no "after".
"""


def wrap(storage: Storage, hook: Hook) -> Any:
    """Return a storage that calls `hook` around every call of `storage`, with exactly the same powers."""
    powers = tuple(power for power in base.POWERS if isinstance(storage, power))
    return _class_for(powers)(storage, hook)


class _Wrapped(base.Storage):
    """The seven verbs. What only a disk needs is called, and hooked, on a disk alone."""

    def __init__(self, inner: Any, hook: Hook) -> None:
        self.inner = inner
        self.hook = hook
        self._indices = itertools.count()

    def __reduce__(self) -> tuple[Any, ...]:
        return wrap, (self.inner, self.hook)

    def __repr__(self) -> str:
        return f"wrap({self.inner!r}, {self.hook!r})"

    def run(
        self,
        call: Call,
        perform: Callable[[], T],
        half: Callable[[], object] = _nothing,
        *,
        size_bytes: Callable[[T], int] | None = None,
    ) -> T:
        """Perform a call between its two hooks. `size_bytes` measures the result."""
        call = replace(call, index=next(self._indices), do_half=half)
        self.hook(call)
        result = perform()
        measured_bytes = size_bytes(result) if size_bytes else call.size_bytes
        self.hook(replace(call, phase="after", size_bytes=measured_bytes, do_half=_nothing))
        return result

    @property
    def uri(self) -> str:
        return str(self.inner.uri)

    def write(self, key: str, views: Views) -> None:
        call = _call("write", key, size_bytes=_size(views))
        self.run(call, lambda: self.inner.write(key, views), lambda: self.inner.write(key, _half(views)))

    def read(self, key: str) -> bytes:
        return self.run(_call("read", key), lambda: bytes(self.inner.read(key)), size_bytes=len)

    def read_into(self, key: str, offset: int, views: Views, *, version: str | None = None) -> None:
        def perform(views: Views = views) -> None:
            self.inner.read_into(key, offset, views, version=version)

        self.run(_call("read_into", key, size_bytes=_size(views)), perform, lambda: perform(_half(views)))

    def doubt(self, key: str, offset: int = 0, size_bytes: int | None = None) -> None:
        self.inner.doubt(key, offset, size_bytes)

    def resolved(self) -> Mapping[str, str]:
        return dict(self.inner.resolved())

    def stat(self, key: str) -> StoredFile:
        found: StoredFile = self.run(_call("stat", key), lambda: self.inner.stat(key))
        return found

    def list(self, prefix: str) -> Iterator[StoredFile]:
        return iter(self.run(_call("list", prefix), lambda: [*self.inner.list(prefix)]))

    def delete(self, keys: Sequence[str]) -> None:
        self._over_keys("delete", keys)

    def close(self) -> None:
        self.run(_call("close", ""), self.inner.close)

    def _over_keys(self, verb: str, keys: Sequence[str]) -> None:
        perform, half = getattr(self.inner, verb), keys[: len(keys) // 2]
        call = _call(verb, keys[0] if keys else "", num_keys=len(keys))
        self.run(call, lambda: perform(keys), (lambda: perform(half)) if half else _nothing)


class _WrappedCreate(_Wrapped):
    def create(self, key: str, data: bytes) -> bool:
        return self.run(_call("create", key, size_bytes=len(data)), lambda: bool(self.inner.create(key, data)))


class _WrappedParts(_Wrapped):
    def part_bytes(self, size_bytes: int) -> int:
        return int(self.inner.part_bytes(size_bytes))

    def open_parts(self, key: str, size_bytes: int) -> PartWriter:
        writer = self.run(_call("open_parts", key), lambda: self.inner.open_parts(key, size_bytes))
        return _WrappedWriter(self, key, writer)


class _WrappedWriter:
    def __init__(self, storage: _Wrapped, key: str, inner: PartWriter) -> None:
        self._storage = storage
        self._key = key
        self._inner = inner

    def write_part(self, offset: int, views: Views, digest: Digest | None = None) -> None:
        def half() -> None:
            try:
                self._inner.write_part(offset, _half(views))
            except StorageError:
                """Parts of this storage are whole or not at all."""

        call = _call("write_part", self._key, size_bytes=_size(views))
        self._storage.run(call, lambda: self._inner.write_part(offset, views, digest), half)

    def finish(self) -> None:
        self._storage.run(_call("finish", self._key), self._inner.finish)

    def abort(self) -> None:
        self._storage.run(_call("abort", self._key), self._inner.abort)


class _WrappedDisk(_Wrapped):
    def persist(self, keys: Sequence[str]) -> None:
        self._over_keys("persist", keys)

    def free_bytes(self) -> int:
        return self.run(_call("free_bytes", ""), lambda: int(self.inner.free_bytes()))

    def local_path(self, key: str) -> Path:
        path: Path = self.inner.local_path(key)
        return path

    def make_directory(self, key: str) -> None:
        self.run(_call("make_directory", key), lambda: self.inner.make_directory(key))

    def remove_directories(self, key: str) -> None:
        self.run(_call("remove_directories", key), lambda: self.inner.remove_directories(key))

    def remove_unfinished(self, key: str, *, before_seconds: float, dry_run: bool = False) -> Sequence[str]:
        return self.run(
            _call("remove_unfinished", key),
            lambda: self.inner.remove_unfinished(key, before_seconds=before_seconds, dry_run=dry_run),
        )

    def link(self, files: Sequence[tuple[str | os.PathLike[str], str]]) -> Sequence[bool]:
        call = _call("link", files[0][1] if files else "", num_keys=len(files))
        return self.run(call, lambda: self.inner.link(files), lambda: self.inner.link(files[: len(files) // 2]))

    def read_steps(
        self,
        key: str,
        offset: int,
        steps: Sequence[Views],
        accept: Callable[[int], bool],
        *,
        version: str | None = None,
    ) -> None:
        """Read in steps; to the hook it is one `read_into` of everything."""
        views = [view for step in steps for view in step]
        self.run(
            _call("read_into", key, size_bytes=_size(views)),
            lambda: self.inner.read_steps(key, offset, steps, accept, version=version),
            lambda: self.inner.read_into(key, offset, _half(views), version=version),
        )

    def write_many(self, files: Sequence[tuple[str, Views]]) -> None:
        size_bytes = sum(_size(views) for _, views in files)
        call = _call("write_many", files[0][0] if files else "", size_bytes=size_bytes, num_keys=len(files))
        self.run(call, lambda: self.inner.write_many(files), lambda: self.inner.write_many(_half_of_files(files)))

    def overwrite(self, key: str, data: bytes) -> None:
        def perform(data: bytes = data) -> None:
            self.inner.overwrite(key, data)

        self.run(_call("write", key, size_bytes=len(data)), perform, lambda: perform(data[: len(data) // 2]))

    def useful_threads(self) -> int:
        return int(self.inner.useful_threads())


class _WrappedCopy(_Wrapped):
    def copy(self, source_key: str, key: str) -> None:
        self.run(_call("copy", key), lambda: self.inner.copy(source_key, key))


class _WrappedCopyFrom(_Wrapped):
    def copy_from(self, source: base.Storage, source_key: str, key: str) -> bool:
        return self.run(_call("copy_from", key), lambda: bool(self.inner.copy_from(source, source_key, key)))


class _WrappedBucket(_Wrapped):
    def rules(self) -> Mapping[str, str]:
        return self.run(_call("rules", ""), lambda: dict(self.inner.rules()))

    def unfinished(self, prefix: str) -> Sequence[tuple[str, str]]:
        return self.run(_call("unfinished", prefix), lambda: [*self.inner.unfinished(prefix)])

    def abort_unfinished(self, key: str, upload_id: str) -> None:
        self.run(_call("abort_unfinished", key), lambda: self.inner.abort_unfinished(key, upload_id))


_WRAPPERS: dict[Any, type[_Wrapped]] = {
    base.CreatesExclusively: _WrappedCreate,
    base.WritesParts: _WrappedParts,
    base.Disk: _WrappedDisk,
    base.CopiesInside: _WrappedCopy,
    base.CopiesFrom: _WrappedCopyFrom,
    base.Bucket: _WrappedBucket,
}


@cache
def _class_for(powers: tuple[Any, ...]) -> type[_Wrapped]:
    return type("WrappedStorage", (*(_WRAPPERS[power] for power in powers), _Wrapped), {})


def _call(verb: str, key: str, *, size_bytes: int = 0, num_keys: int = 1) -> Call:
    if verb not in VERBS:
        raise ValueError(f"no hook could name the call {verb}")
    return Call(verb, key, -1, "before", size_bytes, num_keys)


def _size(views: Views) -> int:
    return sum(len(view) for view in views)


def _half(views: Views) -> list[memoryview]:
    left_bytes, found = _size(views) // 2, []
    for view in views:
        if left_bytes > 0:
            found.append(view[:left_bytes])
        left_bytes -= len(view)
    return found


def _half_of_files(files: Sequence[tuple[str, Views]]) -> list[tuple[str, Views]]:
    """Return the first half of the files, and the first half of the middle one."""
    middle = len(files) // 2
    return [*files[:middle], *((key, _half(views)) for key, views in files[middle : middle + 1])]
