"""`NodeCache.fetch_once`: one download per node."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ckptstore.config import CacheConfig
from ckptstore.errors import CacheError, InvalidInput
from ckptstore.events import DownloadFinished, DownloadStarted, DownloadWaited, emit
from ckptstore.node_cache import eviction, readers
from ckptstore.node_cache.place import CachePlace, boot_id, open_place
from ckptstore.runtime.file_locks import Exclusive
from ckptstore.storage.disk import posix
from ckptstore.storage.disk.local_parts import flush_files

logger = logging.getLogger("ckptstore")

_LOOK_SECONDS = 0.01
"""The longest time after which a waiter sees the copy."""
_TURN_SECONDS = 0.1
"""The longest time after which a waiter sees that the holder failed."""
_TELL_SECONDS = 60.0
_PUBLISH_TRIES = 5
_DOWNLOADS = 3


class NodeCache:
    """The cache in `config.cache_dir`. Any number of objects, threads and processes may use one directory."""

    def __init__(self, config: CacheConfig) -> None:
        """Touch nothing before the first fetch."""
        self.config = config

    @contextlib.contextmanager
    def fetch_once(
        self,
        key: str,
        *,
        step: int,
        size_bytes: int,
        download: Callable[[Path], None],
        expected: Mapping[str, int | None] | None = None,
    ) -> Iterator[Path]:
        """Yield the path of the finished, read-only copy of a key (see `copy_key`) while the context lasts.

        One process of the node calls `download`, which fills the new empty directory it gets with about `size_bytes`
        and verifies the files that it wrote; the others wait for it, at most `cache_wait_seconds`, and then download
        for themselves. When it fails or its process dies, the next one takes over.

        `expected` has the size of each file of the copy by its name, None for a directory. A copy that has lost some of
        them, for instance to a cleaner of temporary directories, is downloaded again and gets them back one by one: its
        readers lose nothing, and it keeps its path.

        Raises the errors of `download`, StorageFull before it when there is too little room, and CacheError when the
        cache directory cannot be used or lets others in. A process that waited emits a DownloadWaited event.
        """
        if not eviction.KEY.fullmatch(key):
            raise InvalidInput(f"{key!r} is no SHA-256 in hex")
        place = open_place(self.config.cache_dir)
        fetch = _Fetch(place, self.config, key, step, size_bytes, download, expected)
        readers.take(place, key, wait_seconds=self.config.cache_wait_seconds)
        try:
            readers.sweep(place)
            eviction.evict(place, self.config)
            fetch.run()
            yield place.copy(key)
        finally:
            if readers.release(place, key):
                eviction.evict(place, self.config)

    @contextlib.contextmanager
    def finished(self, key: str) -> Iterator[Path | None]:
        """Yield the path of the finished copy of a key, which stays while the context lasts; None if there is none, or
        it is being removed. Downloads nothing. Raises CacheError when the cache directory cannot be used."""
        place = open_place(self.config.cache_dir)
        path, is_taken = place.copy(key), False
        if path.is_dir():
            with contextlib.suppress(CacheError):  # another process removes it
                readers.take(place, key, wait_seconds=0.0)
                is_taken = True
        try:
            yield path if is_taken and path.is_dir() else None
        finally:
            if is_taken:
                readers.release(place, key)


@dataclass(frozen=True, slots=True)
class _Fetch:
    """One call; its process holds the lease, so a finished copy stays."""

    place: CachePlace
    config: CacheConfig
    key: str
    step: int
    size_bytes: int
    download: Callable[[Path], None]
    expected: Mapping[str, int | None] | None

    def run(self) -> None:
        """Return once a finished copy exists."""
        if self.is_there():
            return
        turn = Exclusive(self.place.lock(self.key))
        try:
            if self.place.locks_work:
                self.wait_for(turn)
            for _ in range(_DOWNLOADS):
                if self.is_there():  # with the turn or, after the deadline, without it: the rename decides
                    return
                self.fetch()
            if not self.is_there():  # a cleaner may take files of a download too
                raise CacheError(
                    f"{self.place.copy(self.key)} loses files again and again", step=self.step, hint=_CLEANED
                )
        finally:
            turn.give_back()  # the lock file stays: others wait for this very one, and it is removed with the copy

    def is_there(self) -> bool:
        """Return True if a finished copy exists with all its files."""
        return self.place.copy(self.key).is_dir() and next(self.lost(), None) is None

    def lost(self) -> Iterator[str]:
        """List the files that the copy lacks, or has with another size."""
        path = self.place.copy(self.key)
        return (name for name, size in (self.expected or {}).items() if not _is_as_expected(f"{path}/{name}", size))

    def wait_for(self, turn: Exclusive) -> None:
        """Wait for the turn to download, until a copy exists or the deadline has passed."""
        started = told = time.monotonic()
        holder = ""
        with self.place.using():
            while not (ours := turn.take()):
                holder = _read_holder(self.place.holder(self.key)) or holder or "an unknown process"
                waited_seconds = time.monotonic() - started
                if self.appears(_TURN_SECONDS) or waited_seconds > self.config.cache_wait_seconds:
                    break
                if time.monotonic() - told > _TELL_SECONDS:
                    told = time.monotonic()
                    emit(DownloadWaited(step=self.step, holder=holder, seconds=waited_seconds))
        if holder:
            emit(DownloadWaited(step=self.step, holder=holder, seconds=time.monotonic() - started))
        if ours:
            _write_holder(self.place.holder(self.key))

    def appears(self, seconds: float) -> bool:
        """Look for the copy until it exists or the time is over; return True if it exists. Much cheaper than trying
        the lock."""
        end = time.monotonic() + seconds
        while not (there := self.is_there()) and time.monotonic() < end:
            time.sleep(_LOOK_SECONDS)
        return there

    def fetch(self) -> None:
        """Download into a private directory, and rename it to its place."""
        eviction.make_room(self.place, size_bytes=self.size_bytes, step=self.step)
        emit(DownloadStarted(step=self.step, size_bytes=self.size_bytes))
        started = time.monotonic()
        with readers.private_directory(self.place) as private:
            with self.place.using():
                private.mkdir(mode=0o700)
            self.download(private)
            with self.place.using():
                size_bytes = _make_final(private)
                self.publish(private)
        readers.note_size(self.place, self.key, size_bytes)
        emit(DownloadFinished(step=self.step, size_bytes=size_bytes, seconds=time.monotonic() - started))

    def publish(self, private: Path) -> None:
        """Rename a finished download to its place, unless another process was first. An existing copy that has lost
        files gets them back."""
        path = self.place.copy(self.key)
        for _ in range(_PUBLISH_TRIES):
            try:
                os.rename(private, path)
            except OSError:
                if not path.is_dir():
                    raise
                self.mend(private, path)
                if self.is_there():
                    return
            else:
                return
        raise CacheError(f"{path} loses files again and again", step=self.step, hint=_CLEANED)

    def mend(self, private: Path, path: Path) -> None:
        """Move the files that a copy lacks to their places. Its other files stay as they are, for others may be reading
        them."""
        lost = [name for name in self.lost() if (private / name).exists()]
        if lost:
            logger.warning(
                "%s in the node cache had lost %d files, for instance %s. %s", path, len(lost), lost[0], _CLEANED
            )
        for name in lost:
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            if (private / name).is_dir():
                (path / name).mkdir(exist_ok=True)
            else:
                os.replace(private / name, path / name)


_CLEANED = "Set CKPTSTORE_CACHE_DIR to a directory that nothing cleans up"


def _is_as_expected(path: str, size_bytes: int | None) -> bool:
    try:
        status = os.lstat(path)
    except OSError:
        return False
    if size_bytes is None:
        return stat.S_ISDIR(status.st_mode)
    return stat.S_ISREG(status.st_mode) and status.st_size == size_bytes


def _write_holder(path: Path) -> None:
    """Write down which process has the turn, for messages only, so errors are ignored."""
    with contextlib.suppress(OSError):  # replaced whole, for a waiter may be reading it
        new = path.with_suffix(f".{os.getpid()}")
        new.write_text(f"process {os.getpid()} on {socket.gethostname()}")
        new.replace(path)


def _read_holder(path: Path) -> str:
    try:
        return path.read_text(errors="replace")[:200]
    except OSError:
        return ""


def _make_final(directory: Path) -> int:
    """Make the files read-only, and durable where the system has no boot id. Return the size in bytes."""
    size_bytes, files, directories = 0, [], [str(directory)]
    for parent in directories:  # grows meanwhile
        with os.scandir(parent) as entries:
            for entry in entries:
                status = entry.stat(follow_symlinks=False)
                if stat.S_ISREG(status.st_mode):
                    if status.st_mode & 0o222:
                        os.chmod(entry.path, stat.S_IMODE(status.st_mode) & ~0o222)
                    size_bytes += status.st_size
                    files.append(entry.path)
                elif stat.S_ISDIR(status.st_mode):
                    directories.append(entry.path)
    if not boot_id():
        flush_files(files)
        for path in directories:
            posix.flush(path)
    return size_bytes
