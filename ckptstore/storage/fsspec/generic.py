"""Serve any URL that fsspec knows, by its calls for one file. No create-if-absent works on all of them.

So a store there needs `single_writer=True`, but on the three of `clouds`. Further guarantees (atomic writes, fresh
listings) depend on the file system; ckptstore's digests and manifests find the damage where it breaks them.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from datetime import datetime
from functools import partial
from threading import RLock
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
from ckptstore.storage.cloud.bodies import Filling
from ckptstore.storage.uri import Location, parse_uri

_MISSING = frozenset({errno.ENOENT, errno.ENOTDIR})
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_BROKEN = (ConnectionError, TimeoutError, EOFError, BlockingIOError)
_ONE_CONNECTION = frozenset({"ftp", "sftp"})
"""Schemes whose file systems send all threads' requests over one connection, and mix them up."""
_TURN = RLock()
"""Held for each request of theirs: fsspec gives all storages of one host the same file system."""
_TIME_NAMES = ("mtime", "LastModified", "last_modified", "updated", "modified", "created")


class GenericStorage(ProcessBound):
    """Files below a path of a file system."""

    def __init__(self, uri: str, options: Mapping[str, Any], fs: Any = None) -> None:
        """Open it by a file system that is given, else by one that is made with these options."""
        location = parse_uri(uri)
        super().__init__(location.uri)
        self._one_at_a_time = _TURN if location.scheme in _ONE_CONNECTION else nullcontext()
        self._made: set[str] = set()
        self._opened_as = (uri, dict(options), fs)
        with self.seam("open", ""):
            self.system = _checked(fs, location, options) if fs is not None else _opened(location, options)
            self.root = _root_of(type(self.system), location)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._opened_as

    def reopen(self) -> None:
        """Send later requests by a new file system, with new connections."""
        self.system = _again(self.system, skip_instance_cache=True)

    def write(self, key: str, views: Sequence[memoryview]) -> None:
        path = self.path(key)
        with self.seam("write", key):
            directory = path.rpartition("/")[0]
            if self.uri.partition(":")[0] in _ONE_CONNECTION and directory not in self._made:
                self.system.makedirs(directory, exist_ok=True)  # after a failed write the connection may be unusable
                self._made.add(directory)
            try:
                self.stream(path, views)
            except Exception as error:  # where directories exist, they have to be made
                if not isinstance(error, FileNotFoundError) and self.system.exists(directory):
                    raise  # the packages of FTP and WebDAV have errors of their own for a directory that is not there
                self.system.makedirs(directory, exist_ok=True)
                self.stream(path, views)

    def stream(self, path: str, views: Sequence[memoryview], **options: Any) -> None:
        """Write the views to a file that is open meanwhile."""
        with self.system.open(path, "wb", **options) as file:
            for view in views:
                done = 0
                while done < len(view):
                    piece = view[done : done + options.get("block_size", len(view))]  # else a part is all of it
                    written = file.write(piece)
                    done += len(piece) if written is None else written

    def read(self, key: str) -> bytes:
        with self.seam("read", key):
            return bytes(self.system.cat_file(self.path(key)))

    def read_into(self, key: str, offset: int, views: Sequence[memoryview], *, version: str | None = None) -> None:
        """Fill the views; there are no versions, so `version` is always None."""
        filling = Filling(views, key=key)
        if not filling.missing_bytes:
            return
        end = offset + filling.missing_bytes
        with self.seam("read", key):
            try:
                filling.take(self.system.cat_file(self.path(key), start=offset, end=end))
            except Exception:
                if self.stat(key).size_bytes > offset:
                    raise  # else some file systems refuse a range that begins behind the end
        filling.end(file_bytes=self.stat(key).size_bytes if filling.missing_bytes else None, end_offset=end)

    def doubt(self, key: str, offset: int = 0, size_bytes: int | None = None) -> None:
        self.system.invalidate_cache()

    def stat(self, key: str) -> StoredFile:
        path = self.path(key)
        with self.seam("stat", key):
            self.system.invalidate_cache()
            found = self.system.info(path)
            if found["type"] != "file":
                raise FileNotFoundError(path)
            return stored(key, found)

    def list(self, prefix: str) -> Iterator[StoredFile]:
        directory = self.path(prefix).rpartition("/")[0]
        cut = len(self.root) + 1
        with self.seam("list", prefix):
            self.system.invalidate_cache()
            has_own = _has_own_find(self.system)
            found = self.system.find(directory, detail=True) if has_own else self._walked(directory)
        for path, item in found.items():
            key = str(path)[cut:]
            if key.startswith(prefix):
                yield stored(key, item)

    def _walked(self, directory: str) -> Mapping[str, Mapping[str, Any]]:
        """Return the files below a directory as fsspec's `find` does, which takes a directory for empty if its listing
        breaks off."""
        found: dict[str, Mapping[str, Any]] = {}
        directories = [directory]
        while directories:
            path = directories.pop()
            try:
                items = self.system.ls(path, detail=True)
            except OSError as error:
                if isinstance(error, FileNotFoundError) or error.errno in _MISSING:  # by now, or from the start
                    continue
                raise
            for item in items:
                if item["type"] != "directory":
                    found[item["name"]] = item
                elif item["name"].rstrip("/") != path.rstrip("/"):
                    directories.append(item["name"])
        return found

    def delete(self, keys: Sequence[str]) -> None:
        for key in dict.fromkeys(keys):
            path = self.path(key)
            with suppress(FileMissing), self.seam("delete", key):
                if self.system.info(path)["type"] == "file":
                    self.system.rm_file(path)

    def close(self) -> None:
        """Do nothing: the file system closes itself."""

    def path(self, key: str) -> str:
        self.check_process()
        path = f"{self.root}/{key}"
        if self.system._strip_protocol(path).rstrip("/") != path.rstrip("/"):
            raise InvalidName(f"{key!r} is another name to the file system of {self.uri}", hint="Rename the file")
        return path

    @contextmanager
    def seam(self, what: str, key: str) -> Iterator[None]:
        """Translate foreign errors to those of ckptstore, one request at a time where the file system has one
        connection."""
        what = f"{what} {self.uri}"
        with self._one_at_a_time, foreign.seam(lambda error: self.translated(error, what=what, key=key)):
            yield

    def translated(self, error: Exception, *, what: str, key: str) -> CkptstoreError:
        """Return the error of ckptstore for one of the file system."""
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


def class_for(uri: str) -> type:
    """Return the class of file systems that serves a URL. Raises ImportError if its package is missing."""
    # gcsfs reads this at import: with it, it asks Google over gRPC about each bucket, and hangs where that is blocked.
    os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    import fsspec

    return fsspec.get_filesystem_class(parse_uri(uri).scheme)  # type: ignore[no-any-return]


def _opened(location: Location, options: Mapping[str, Any]) -> Any:
    """Return the file system of a location. Raises InvalidInput if it reads the URI as another one."""
    uri = location.uri
    cls: Any = class_for(uri)
    named = cls._get_kwargs_from_urls(uri)
    for name in named.keys() & options.keys():
        if named[name] != options[name]:
            raise InvalidInput(f"{uri} and storage_options[{name!r}] differ", hint="Give it once")
    host = str(named.get("host") or (location.container if location.scheme in ("http", "https") else ""))
    if host != host.lower():
        raise InvalidInput(f"The host of {uri} has capital letters", hint="Write it in small letters")
    refused = InvalidInput(f"storage_options of {location.scheme}:// cannot be used")
    if {"asynchronous", "loop"} & options.keys():
        raise refused
    import fsspec

    try:
        return _without_listings(partial(fsspec.filesystem, location.scheme), {**named, **options})
    except TypeError:
        raise refused from None


def _checked(fs: Any, location: Location, options: Mapping[str, Any]) -> Any:
    """Return a file system that was given, without its cache of listings. Raises InvalidInput if it does not serve the
    location."""
    from fsspec import AbstractFileSystem
    from fsspec.implementations.cached import CachingFileSystem

    uri = location.uri
    if not isinstance(fs, AbstractFileSystem):
        raise InvalidInput(f"fs is a {type(fs).__name__}, it is a file system of fsspec")
    if options:
        raise InvalidInput("storage_options and fs are both given", hint="The file system has options of its own")
    if isinstance(fs, CachingFileSystem):
        raise InvalidInput("fs has a cache in front of it, which shows what was", hint="Give the file system behind it")
    if getattr(fs, "asynchronous", False):
        raise InvalidInput("fs is asynchronous", hint="Make it without asynchronous=True")
    protocols = {fs.protocol} if isinstance(fs.protocol, str) else set(fs.protocol)
    if location.scheme not in protocols:
        raise InvalidInput(f"fs does not serve {uri}", hint=f"It serves {', '.join(sorted(protocols))}")
    for name, value in fs._get_kwargs_from_urls(uri).items():
        if fs.storage_options.get(name, getattr(fs, name, None)) != value:
            raise InvalidInput(f"{uri} names another {name} than fs has")
    return _again(fs) if getattr(fs.dircache, "use_listings_cache", False) else fs


def _again(fs: Any, **more: Any) -> Any:
    """Return a file system with the same arguments, without a cache of listings."""
    options = {name: value for name, value in fs.storage_options.items() if name != "use_listings_cache"}
    family: Callable[..., Any] = type(fs)
    return _without_listings(partial(family, *fs.storage_args), {**options, **more})


def _without_listings(make: Callable[..., Any], options: Mapping[str, Any]) -> Any:
    """Make a file system that keeps no listings. Raises TypeError for options that it does not accept."""
    try:
        return make(**{"use_listings_cache": False, **options})
    except TypeError:  # those that keep none at all, of sftp and WebDAV, pass every option on to their client
        return make(**options)


def _has_own_find(system: Any) -> bool:
    """Return True if a file system lists whole trees in a way of its own."""
    from fsspec import AbstractFileSystem
    from fsspec.asyn import AsyncFileSystem
    from fsspec.implementations.dirfs import DirFileSystem

    while isinstance(system, DirFileSystem):
        system = system.fs
    families = [family for family in type(system).__mro__ if family not in (AbstractFileSystem, AsyncFileSystem)]
    return any({"find", "_find"} & vars(family).keys() for family in families)


def _root_of(cls: Any, location: Location) -> str:
    """Return the path of a location. Raises InvalidInput if it is another one to its file system."""
    from fsspec.implementations.local import LocalFileSystem

    uri = location.uri
    if cls is LocalFileSystem:
        raise InvalidInput(f"{uri} is a path of this machine", hint="Give the path itself")
    path = str(cls._strip_protocol(uri)).rstrip("/")
    if not f"/{path}".endswith(f"/{location.prefix}".rstrip("/")):
        raise InvalidInput(f"{uri} is {path!r} to its file system", hint="Give a name without special characters")
    return path


def stored(key: str, item: Mapping[str, Any]) -> StoredFile:
    """Return what a file system says about a file."""
    value = next((item[name] for name in _TIME_NAMES if item.get(name)), 0.0)
    if isinstance(value, str):
        value = datetime.fromisoformat(value)
    modified = value.timestamp() if isinstance(value, datetime) else float(value)
    return StoredFile(key, int(item["size"] or 0), modified)
