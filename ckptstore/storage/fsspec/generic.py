"""Serve any URL that fsspec knows, by its calls for one file. No create-if-absent works on all of them.

So a store there needs `single_writer=True`. Further guarantees (atomic writes, fresh listings) depend on the file
system; ckptstore's digests and manifests find the damage where it breaks them.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from datetime import datetime
from typing import Any

from ckptstore.errors import (
    AccessDenied,
    CkptstoreError,
    FileMissing,
    InvalidInput,
    InvalidName,
    StorageError,
    StorageFull,
)
from ckptstore.storage.base import ProcessBound, StoredFile
from ckptstore.storage.cloud import foreign
from ckptstore.storage.cloud.bodies import Filling, total_bytes
from ckptstore.storage.uri import Location, parse_uri

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_BROKEN = (ConnectionError, TimeoutError, EOFError, BlockingIOError)
_TIME_NAMES = ("mtime", "LastModified", "last_modified", "updated", "modified", "created")


class GenericStorage(ProcessBound):
    """Files below a path of a file system."""

    def __init__(self, uri: str, options: Mapping[str, Any]) -> None:
        import fsspec

        location = parse_uri(uri)
        super().__init__(location.uri)
        self._options = dict(options)
        cls = fsspec.get_filesystem_class(location.scheme)  # raises ImportError for a missing package
        with self._seam("open", ""):
            self._system, self._root = _open(cls, location, options)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.uri, self._options)

    def write(self, key: str, views: Sequence[memoryview]) -> None:
        path = self._path(key)
        with self._seam("write", key):
            try:
                self._put(path, views)
            except FileNotFoundError:  # where directories exist, they have to be made
                self._system.makedirs(path.rpartition("/")[0], exist_ok=True)
                self._put(path, views)

    def _put(self, path: str, views: Sequence[memoryview]) -> None:
        with self._system.open(path, "wb") as file:
            for view in views:
                done = 0
                while done < len(view):
                    written = file.write(view[done:])
                    done += len(view) - done if written is None else written

    def read(self, key: str) -> bytes:
        with self._seam("read", key):
            return bytes(self._system.cat_file(self._path(key)))

    def read_into(self, key: str, offset: int, views: Sequence[memoryview], *, version: str | None = None) -> None:
        """Fill the views; there are no versions, so `version` is always None."""
        filling = Filling(views, key=key)
        if not total_bytes(views):
            return
        end = offset + filling.missing_bytes
        with self._seam("read", key):
            try:
                filling.take(self._system.cat_file(self._path(key), start=offset, end=end))
            except (OSError, ValueError):
                if self.stat(key).size_bytes > offset:
                    raise  # else some file systems refuse a range that begins behind the end
        filling.end(file_bytes=self.stat(key).size_bytes if filling.missing_bytes else None, end_offset=end)

    def doubt(self, key: str, offset: int = 0, size_bytes: int | None = None) -> None:
        """See `Doubts`."""
        self._system.invalidate_cache()

    def stat(self, key: str) -> StoredFile:
        path = self._path(key)
        with self._seam("stat", key):
            self._system.invalidate_cache()
            found = self._system.info(path)
            if found["type"] != "file":
                raise FileNotFoundError(path)
            return _stored(key, found)

    def list(self, prefix: str) -> Iterator[StoredFile]:
        directory = self._path(prefix).rpartition("/")[0]
        cut = len(self._root) + 1
        with self._seam("list", prefix):
            self._system.invalidate_cache()
            found = self._system.find(directory, detail=True)
        for path, item in found.items():
            key = str(path)[cut:]
            if key.startswith(prefix):
                yield _stored(key, item)

    def delete(self, keys: Sequence[str]) -> None:
        for key in dict.fromkeys(keys):
            path = self._path(key)
            with suppress(FileMissing), self._seam("delete", key):
                if self._system.info(path)["type"] == "file":
                    self._system.rm_file(path)

    def close(self) -> None:
        """Do nothing: the file system closes itself."""

    def _path(self, key: str) -> str:
        self.check_process()
        path = f"{self._root}/{key}"
        if self._system._strip_protocol(path).rstrip("/") != path.rstrip("/"):
            raise InvalidName(f"{key!r} is another name to the file system of {self.uri}", hint="Rename the file")
        return path

    def _seam(self, what: str, key: str) -> AbstractContextManager[None]:
        """Translate foreign errors to those of ckptstore."""
        return foreign.seam(lambda error: _translated(error, what=f"{what} {self.uri}", key=key))


def _open(cls: Any, location: Location, options: Mapping[str, Any]) -> tuple[Any, str]:
    """Return the file system and the path of a location. Raises InvalidInput if it reads the URI as another one."""
    import fsspec
    from fsspec.implementations.local import LocalFileSystem

    uri = location.uri
    told = cls._get_kwargs_from_urls(uri)
    for name in told.keys() & options.keys():
        if told[name] != options[name]:
            raise InvalidInput(f"{uri} and storage_options[{name!r}] differ", hint="Give it once")
    host = str(told.get("host") or (location.container if location.scheme in ("http", "https") else ""))
    if host != host.lower():
        raise InvalidInput(f"The host of {uri} has capital letters", hint="Write it in small letters")
    try:
        system = fsspec.filesystem(location.scheme, **{"use_listings_cache": False, **told, **options})
    except TypeError:
        raise InvalidInput(f"storage_options of {location.scheme}:// cannot be used") from None
    if type(system) is LocalFileSystem:
        raise InvalidInput(f"{uri} is a path of this machine", hint="Give the path itself")
    path = str(cls._strip_protocol(uri)).rstrip("/")
    if not f"/{path}".endswith(f"/{location.prefix}".rstrip("/")):
        raise InvalidInput(f"{uri} is {path!r} to its file system", hint="Give a name without special characters")
    return system, path


def _translated(error: Exception, *, what: str, key: str) -> CkptstoreError:
    if isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError):
        return FileMissing(f"{what}: it is not there", file=key)
    if isinstance(error, PermissionError):
        return AccessDenied(f"{what}: {type(error).__name__}", file=key)
    if isinstance(error, OSError) and error.errno in _FULL:
        return StorageFull(f"{what}: {type(error).__name__}", file=key)
    if isinstance(error, _BROKEN) or type(error).__name__ == "FSTimeoutError" or foreign.passing_trouble(error):
        return foreign.broken_off(error, what=what, key=key)
    if isinstance(error, OSError) and error.errno is not None:
        return StorageError(f"{what}: {os.strerror(error.errno)}", file=key)
    return foreign.unexpected(error, what=what, key=key)


def _stored(key: str, item: Mapping[str, Any]) -> StoredFile:
    value = next((item[name] for name in _TIME_NAMES if item.get(name)), 0.0)
    if isinstance(value, str):
        value = datetime.fromisoformat(value)
    modified = value.timestamp() if isinstance(value, datetime) else float(value)
    return StoredFile(key, int(item["size"] or 0), modified)
