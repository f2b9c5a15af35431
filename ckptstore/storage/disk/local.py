"""A directory on a disk or a shared file system as a storage.

Keys are paths below the root. Create-if-absent is an exclusive hard link of a finished temporary file, so that it
holds on every POSIX file system, NFS included. Written files are durable after `persist`, created ones at once, unless
the storage was opened with `durable=False`. A file that is replaced is replaced whole.

Nothing outside of the root is touched: nothing is written or deleted through a symbolic link below the root, and no
link is listed. The root itself may lie below one.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from ckptstore.errors import CheckpointDamaged, CkptstoreError, FileMissing, InvalidName, StorageError
from ckptstore.format.layout import check_name
from ckptstore.storage.base import PartWriter, Storage, StoredFile
from ckptstore.storage.disk import posix
from ckptstore.storage.disk.local_parts import READ_ONLY, WRITABLE, NewFile, flush_all, flush_files

T = TypeVar("T")

_TEMPORARY = ".ckptstore-tmp-"
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
_OLD = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_PART_BYTES = 1 << 20
"""A part size so small that a hashed part is still in the processor's cache when it is written."""
_LARGE_BYTES = 16 << 20
_LARGE_PART_BYTES = 4 << 20
"""The part size of large files: fewer parts leave the interpreter to other threads."""
_DIRECT_PART_BYTES = 8 << 20
"""The part size past the page cache, where fewer calls take half the processor time."""
_DISK_THREADS = 2
"""The useful threads on a disk: a directory takes one new file at a time, and the interpreter runs one thread."""
_NETWORK_THREADS = 64
"""The useful threads on a network, where a new file is a wait for a server."""
_DIRECTORY_TRIES = 8
"""The tries to create a directory that another process removes while it is empty."""


class LocalStorage(Storage):
    """The files below one directory. Safe for threads and processes; pickled as its path and options."""

    def __init__(self, root: str | os.PathLike[str], *, durable: bool = True, direct_io: bool = True) -> None:
        """Create nothing before the first write. With `durable=False` no file is ever flushed to the disk.
        `direct_io` writes large files past the page cache, if they are to be durable and the file system can."""
        self._root = os.path.abspath(root)
        self._durable = durable
        self._direct_io = direct_io
        self._flushed: set[str] = set()
        self._made_in: set[str] = set()

    def __repr__(self) -> str:
        return f"LocalStorage({self._root!r})"

    def __reduce__(self) -> tuple[Callable[..., LocalStorage], tuple[str]]:
        return partial(LocalStorage, durable=self._durable, direct_io=self._direct_io), (self._root,)

    @property
    def uri(self) -> str:
        return self._root

    def write(self, key: str, views: Sequence[memoryview]) -> None:
        path = self._own_path(key)
        self._flushed.discard(key)
        try:
            try:
                descriptor = os.open(path, _NEW, READ_ONLY)
            except FileNotFoundError:
                descriptor = self._in_directory(path, lambda: os.open(path, _NEW, READ_ONLY))
            try:
                posix.write_at(descriptor, views, 0)
            except BaseException:
                _remove(path)
                raise
            finally:
                os.close(descriptor)
        except FileExistsError:
            size_bytes = sum(map(len, views))
            with (
                self._translating("Writing", key, size_bytes),
                self._temporary(path, views, durable=False) as temporary,
            ):
                os.rename(temporary, path)
        except OSError as error:
            raise self._error(error, "Writing", key, sum(map(len, views))) from error

    def write_many(self, files: Sequence[tuple[str, Sequence[memoryview]]]) -> None:
        """Write new files in existing directories in less time; leave all others, and all errors, to `write`."""
        looked_at: set[str] = set()
        for key, views in files:
            path = self._own_path(key, looked_at)
            try:
                descriptor = os.open(path, _NEW, READ_ONLY)
            except OSError:
                self.write(key, views)
                continue
            try:
                try:
                    is_whole = os.writev(descriptor, views) == sum(map(len, views))
                finally:
                    os.close(descriptor)  # NFS says here that a quota is used up
            except OSError:
                is_whole = False
            if not is_whole:
                _remove(path)
                self.write(key, views)

    def overwrite(self, key: str, data: bytes) -> None:
        # To replace the file costs milliseconds, which a save waits for: ext4 writes back what a rename replaces.
        path, flags = self._own_path(key), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        with self._translating("Writing", key, len(data)):
            try:
                descriptor = self._in_directory(path, lambda: os.open(path, flags, WRITABLE))
            except PermissionError:  # an earlier version has made it read-only
                _remove(path)
                descriptor = os.open(path, flags, WRITABLE)
            try:
                posix.write_at(descriptor, [memoryview(data)], 0)
                os.ftruncate(descriptor, len(data))
            finally:
                os.close(descriptor)

    def useful_threads(self) -> int:
        return _DISK_THREADS if posix.is_on_disk(self._root) else _NETWORK_THREADS

    def read(self, key: str) -> bytes:
        data = self.read_if_there(key)
        if data is None:
            raise self._missing(key)
        return data

    def read_if_there(self, key: str) -> bytes | None:
        try:
            with open(self._path(key), "rb", buffering=0, opener=lambda path, _: os.open(path, _OLD)) as file:
                return file.read() if stat.S_ISREG(os.fstat(file.fileno()).st_mode) else None
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            return None
        except OSError as error:
            raise self._error(error, "Reading", key) from error

    def read_into(self, key: str, offset: int, views: Sequence[memoryview], *, version: str | None = None) -> None:
        self.read_steps(key, offset, (views,), lambda _: True, version=version)

    def read_steps(
        self,
        key: str,
        offset: int,
        steps: Sequence[Sequence[memoryview]],
        accept: Callable[[int], bool],
        *,
        version: str | None = None,
    ) -> None:
        with self._opened(key) as (descriptor, status):
            if version is not None and version != _version(status):
                raise CheckpointDamaged(f"{key} in {self._root} is not the file that was found before", file=key)
            for number, views in enumerate(steps):
                wanted = sum(map(len, views))
                while True:
                    if (count := posix.read_at(descriptor, views, offset)) != wanted:
                        found = f"{offset + count} bytes at most, {offset + wanted} were expected"
                        raise CheckpointDamaged(f"{key} in {self._root} has {found}", file=key)
                    if accept(number):
                        break
                    posix.forget_pages(descriptor)
                offset += wanted

    def doubt(self, key: str, offset: int = 0, size_bytes: int | None = None) -> None:
        """See `Doubts`: the next read comes from the disk itself, as far as the system allows."""
        with contextlib.suppress(CkptstoreError), self._opened(key) as (descriptor, _):
            posix.forget_pages(descriptor)

    def stat(self, key: str) -> StoredFile:
        try:
            status = os.lstat(self._path(key))
        except OSError as error:
            raise self._error(error, "Looking at", key) from error
        if not stat.S_ISREG(status.st_mode):
            raise self._missing(key)
        return _stored(key, status)

    def list(self, prefix: str) -> Iterator[StoredFile]:
        directory, _, start = prefix.rpartition("/")
        if directory:
            check_name(directory)
        return self._walk(f"{directory}/" if directory else "", start)

    def delete(self, keys: Sequence[str]) -> None:
        looked_at: set[str] = set()
        for key in keys:
            path = self._own_path(key, looked_at)
            try:
                os.unlink(path)
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as error:
                raise self._error(error, "Deleting", key) from error

    def close(self) -> None:
        """Do nothing: there are no connections."""

    def create(self, key: str, data: bytes) -> bool:
        path = self._own_path(key)
        if os.path.lexists(path):
            return False
        with (
            self._translating("Creating", key, len(data)),
            self._temporary(path, [memoryview(data)], durable=self._durable) as temporary,
        ):
            if not posix.link_new(temporary, path):
                return False
            if self._durable:
                self._flush_directories([key])
            return True

    def part_bytes(self, size_bytes: int) -> int:
        if size_bytes < _LARGE_BYTES:
            return _PART_BYTES
        is_direct = self._durable and self._direct_io and posix.writes_directly(self._root)
        return _DIRECT_PART_BYTES if is_direct else _LARGE_PART_BYTES

    def open_parts(self, key: str, size_bytes: int) -> PartWriter:
        path = self._own_path(key)
        self._flushed.discard(key)
        with self._translating("Writing", key, size_bytes):
            self._make_directories(os.path.dirname(path))
            _remove(path)
            return NewFile(
                key,
                path,
                size_bytes=size_bytes,
                writes_back=self._durable,
                direct=self._durable and self._direct_io,
                mode=READ_ONLY,
                flushed=self._flushed.add if self._durable else None,
            )

    def persist(self, keys: Sequence[str]) -> None:
        if not self._durable or not keys:
            return
        left = [key for key in keys if key not in self._flushed]
        with self._translating("Making durable", "" if len(left) > 1 else (left or keys)[0]):
            flush_files([f"{self._root}/{key}" for key in left])
            self._flush_directories(keys)
        self._flushed.difference_update(keys)

    def free_bytes(self) -> int:
        with self._translating("Looking at", ""):
            return posix.free_bytes(self._root)

    def local_path(self, key: str) -> Path:
        return Path(self._path(key) if key else self._root)

    def make_directory(self, key: str) -> None:
        with self._translating("Creating the directory", key):
            self._make_directories(self._own_directory(check_name(key)) if key else self._root)

    def remove_directories(self, key: str) -> None:
        """Remove also the temporary files that a killed process left behind."""
        for directory, _, names in os.walk(self._own_directory(check_name(key)), topdown=False):
            for name in names:
                if name.startswith(_TEMPORARY):
                    _remove(os.path.join(directory, name))
            with contextlib.suppress(OSError):
                os.rmdir(directory)

    def remove_unfinished(self, key: str, *, before_seconds: float, dry_run: bool = False) -> Sequence[str]:
        directory, found = self._own_directory(check_name(key)) if key else self._root, []
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(directory) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):  # its writer is alive
                    is_left = entry.name.startswith(_TEMPORARY) and entry.is_file(follow_symlinks=False)
                    if is_left and entry.stat(follow_symlinks=False).st_mtime < before_seconds:
                        found.append(f"{key}/{entry.name}" if key else entry.name)
        for name in () if dry_run else found:
            _remove(f"{self._root}/{name}")
        return sorted(found)

    def link(self, files: Sequence[tuple[str | os.PathLike[str], str]]) -> Sequence[bool]:
        looked_at: set[str] = set()
        self._flushed.difference_update([key for _, key in files])
        return [self._link(os.fspath(path), key, looked_at) for path, key in files]

    def _link(self, source: str, key: str, looked_at: set[str]) -> bool:
        target = self._own_path(key, looked_at)
        try:
            try:
                os.link(source, target)
            except FileExistsError:
                _remove(target)
                os.link(source, target)
            except FileNotFoundError:
                self._in_directory(target, lambda: os.link(source, target))
        except OSError as error:
            if not os.path.exists(source):
                raise self._error(error, "Linking", key) from error
            return False
        return True

    def copy(self, source_key: str, key: str) -> None:
        self.copy_from(self, source_key, key)

    def copy_from(self, source: Storage, source_key: str, key: str) -> bool:
        """Copy by a reflink if the file system has them, else inside the kernel; never as a name of the same inode."""
        if not isinstance(source, LocalStorage):
            return False
        path = self._own_path(key)
        self._flushed.discard(key)
        with source._opened(source_key) as (given, status), self._translating("Copying", key, status.st_size):
            _remove(path)
            target = self._in_directory(path, lambda: os.open(path, _NEW, READ_ONLY))
            try:
                if not posix.clone(given, target):
                    posix.copy_contents(given, target, status.st_size)
            except BaseException:
                _remove(path)
                raise
            finally:
                os.close(target)
        return True

    def _path(self, key: str) -> str:
        check_name(key)
        if _TEMPORARY in key:
            raise InvalidName(f"The name {key!r} is reserved for files that are being written")
        return f"{self._root}/{key}"

    def _own_path(self, key: str, looked_at: set[str] | None = None) -> str:
        """Return the path of a file to be written or deleted. `looked_at` collects the directories already checked.

        Raises StorageError if a symbolic link is on the way: files behind it are not the store's.
        """
        path, end = self._path(key), key.rfind("/")
        if end > 0 and (looked_at is None or key[:end] not in looked_at):
            self._own_directory(key[:end])
            if looked_at is not None:
                looked_at.add(key[:end])
        return path

    def _own_directory(self, key: str) -> str:
        """Return the path of a directory as `_own_path` does; it must not be a link itself."""
        path, end = f"{self._root}/{key}", 0
        while end >= 0:
            end = key.find("/", end + 1)
            part = f"{self._root}/{key[:end]}" if end > 0 else path
            try:
                is_link = stat.S_ISLNK(os.lstat(part).st_mode)
            except OSError:  # it does not exist; the caller's next use of it raises the reason
                break
            if is_link:
                raise StorageError(
                    f"{part} is a symbolic link, and nothing is written or deleted through one",
                    file=key,
                    hint="Put a directory in its place; only the root of a store may lie below a link",
                )
        return path

    @contextlib.contextmanager
    def _opened(self, key: str) -> Iterator[tuple[int, os.stat_result]]:
        path = self._path(key)
        with self._translating("Reading", key):
            descriptor = os.open(path, _OLD)
            try:
                status = os.fstat(descriptor)
                if not stat.S_ISREG(status.st_mode):
                    raise self._missing(key)
                yield descriptor, status
            finally:
                os.close(descriptor)

    def _walk(self, directory: str, start: str) -> Iterator[StoredFile]:
        found: list[StoredFile] = []
        below: list[str] = []
        try:
            with os.scandir(f"{self._root}/{directory}") as entries:
                for entry in entries:
                    name = entry.name
                    if name.startswith(start) and not name.startswith(_TEMPORARY):
                        if entry.is_file(follow_symlinks=False):
                            try:
                                found.append(_stored(directory + name, entry.stat(follow_symlinks=False)))
                            except FileNotFoundError:  # deleted meanwhile
                                continue
                        elif entry.is_dir(follow_symlinks=False):
                            below.append(f"{directory}{name}/")
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            raise self._error(error, "Listing", directory) from error
        yield from found
        for name in below:
            yield from self._walk(name, "")

    @contextlib.contextmanager
    def _temporary(self, path: str, views: Sequence[memoryview], *, durable: bool) -> Iterator[str]:
        """Yield the path of a finished file beside `path`, durable on request, and remove it when the context ends."""
        temporary = f"{os.path.dirname(path)}/{_TEMPORARY}{os.getpid()}-{secrets.token_hex(8)}"
        descriptor = self._in_directory(path, lambda: os.open(temporary, _NEW, READ_ONLY))
        try:
            try:
                posix.write_at(descriptor, views, 0)
                if durable:
                    os.fsync(descriptor)
            finally:
                os.close(descriptor)
            yield temporary
        finally:
            _remove(temporary)

    def _in_directory(self, path: str, action: Callable[[], T]) -> T:
        """Run an action that needs the directory of `path`, which is created if absent."""
        for _ in range(_DIRECTORY_TRIES):
            try:
                return action()
            except FileNotFoundError:
                self._make_directories(os.path.dirname(path))
        return action()

    def _make_directories(self, path: str) -> None:
        """Create missing directories, and remember those that hold a new one: they are not durable yet."""
        if os.path.isdir(path):
            return
        above, holders = path, set()
        while not os.path.isdir(above):
            above = os.path.dirname(above)
            holders.add(above)
        first = f"{self._root}/{path[len(self._root) + 1 :].partition('/')[0]}"
        if self._root in holders and first != path:  # the new directory below the root holds checkpoints
            with contextlib.suppress(FileExistsError):  # if another process makes and removes it meanwhile
                os.makedirs(first, exist_ok=True)
            posix.spread_directories(first)
        os.makedirs(path, exist_ok=True)
        self._made_in |= holders

    def _flush_directories(self, keys: Sequence[str]) -> None:
        """Call fsync for the directories of the files, and for every one in which this storage has created another.

        Another process makes the directories that it creates durable before anything refers to them.
        """
        made = set(self._made_in)
        parents = {f"{self._root}/{key}".rstrip("/") or "/" for key in {key.rpartition("/")[0] for key in keys}}
        flush_all(posix.flush_directory, sorted(parents | made, reverse=True))
        self._made_in -= made

    def _missing(self, key: str) -> FileMissing:
        return FileMissing(f"There is no file {key} in {self._root}", file=key)

    @contextlib.contextmanager
    def _translating(self, doing: str, key: str, needed_bytes: int | None = None) -> Iterator[None]:
        try:
            yield
        except StorageError:
            raise
        except OSError as error:
            raise self._error(error, doing, key, needed_bytes) from error

    def _error(self, error: OSError, doing: str, key: str, needed_bytes: int | None = None) -> StorageError:
        return posix.translate(
            error,
            what=f"{doing} {key} in {self._root}" if key else f"{doing} {self._root}",
            file=key or self._root,
            needed_bytes=needed_bytes,
            directory=self._root,
        )


def _remove(path: str) -> None:
    """Remove a file if it exists. Raises OSError if it stays."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def _version(status: os.stat_result) -> str:
    return f"{status.st_size}-{status.st_mtime_ns}-{status.st_ino}"


def _stored(key: str, status: os.stat_result) -> StoredFile:
    return StoredFile(key, status.st_size, status.st_mtime_ns / 1e9, _version(status))
