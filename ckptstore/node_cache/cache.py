"""`NodeCache.fetch_once`: the story of one download per node. The only importer of filelock."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ckptstore.config import CacheConfig
from ckptstore.errors import CacheError, InvalidInput
from ckptstore.events import DownloadFinished, DownloadStarted, DownloadWaited, emit
from ckptstore.node_cache import eviction, leases
from ckptstore.node_cache.place import Place, open_place
from ckptstore.storage import posix
from ckptstore.storage.local_parts import flush_files

_LOOK_SECONDS = 0.01
"""How late a waiter sees the copy, at most."""
_TURN_SECONDS = 0.1
"""How late a waiter sees that the holder failed, at most."""
_TELL_SECONDS = 60.0
_PUBLISH_TRIES = 5


class NodeCache:
    """The cache in `config.cache_dir`. Any number of objects, threads and processes may use one directory."""

    def __init__(self, config: CacheConfig) -> None:
        """Nothing is touched before the first fetch."""
        self.config = config

    @contextlib.contextmanager
    def fetch_once(
        self,
        key: str,
        *,
        step: int,
        size_bytes: int,
        download: Callable[[Path], None],
        check: Callable[[Path], bool] | None = None,
    ) -> Iterator[Path]:
        """The finished copy of what `key` (64 hex digits) stands for, read-only, until the context is left.

        One process of the node calls `download`, which fills the given new empty directory with about `size_bytes`
        and verifies what it wrote; the others wait for it, at most `cache_wait_seconds`, and then download for
        themselves. When it fails or its process dies, the next one takes over. `check` looks at a copy that is there
        already; when it returns False the copy is thrown away, and downloaded anew.

        Raises what `download` raises, StorageFull before it when the room is too small, and CacheError when the cache
        directory cannot be used or lets others in. Who waited, and for whom, is told by a DownloadWaited event.
        """
        if not eviction.KEY.fullmatch(key):
            raise InvalidInput(f"{key!r} is no SHA-256 in hex")
        place = open_place(self.config.cache_dir)
        fetch = _Fetch(place, self.config, key, step, size_bytes, download, check)
        leases.take(place, key, wait_seconds=self.config.cache_wait_seconds)
        try:
            leases.sweep(place)
            eviction.evict(place, self.config)
            fetch.run()
            yield place.copy(key)
        finally:
            if leases.release(place, key):
                eviction.evict(place, self.config)


@dataclass(frozen=True, slots=True)
class _Fetch:
    """One call; its process holds the lease, so what is finished stays."""

    place: Place
    config: CacheConfig
    key: str
    step: int
    size_bytes: int
    download: Callable[[Path], None]
    check: Callable[[Path], bool] | None

    def run(self) -> None:
        """Return when a finished copy is there."""
        if self.is_there():
            return
        turn = _turn(self.place.lock(self.key)) if self.place.locks_work else None
        ours = turn is not None and self.wait_for(turn)
        try:
            if not self.is_there():  # with the turn or, after the deadline, without it: the rename decides
                self.fetch()
        finally:
            if turn is not None and ours:
                turn.give_back()

    def is_there(self) -> bool:
        """Whether there is a finished copy that can be used."""
        path = self.place.copy(self.key)
        return path.is_dir() and (self.check is None or self.check(path))

    def wait_for(self, turn: _Turn) -> bool:
        """True with the turn to download; False when a copy is there, or when the deadline is past."""
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
        return ours

    def appears(self, seconds: float) -> bool:
        """Look for the copy, which costs much less than to try the lock, until it is there or the time is over."""
        end = time.monotonic() + seconds
        while not (there := self.is_there()) and time.monotonic() < end:
            time.sleep(_LOOK_SECONDS)
        return there

    def fetch(self) -> None:
        """Download into a private directory, and give it its name."""
        eviction.make_room(self.place, size_bytes=self.size_bytes, step=self.step)
        emit(DownloadStarted(step=self.step, size_bytes=self.size_bytes))
        started = time.monotonic()
        with leases.private_directory(self.place) as private:
            with self.place.using():
                private.mkdir(mode=0o700)
            self.download(private)
            with self.place.using():
                size_bytes = _make_final(private)
                self.publish(private)
        leases.note_size(self.place, self.key, size_bytes)
        emit(DownloadFinished(step=self.step, size_bytes=size_bytes, seconds=time.monotonic() - started))

    def publish(self, private: Path) -> None:
        """Rename a finished download to its place, unless another process was first with a good one."""
        path = self.place.copy(self.key)
        for _ in range(_PUBLISH_TRIES):
            try:
                os.rename(private, path)
            except OSError:
                if not path.is_dir():
                    raise
                if self.is_there():
                    return
                with leases.private_directory(self.place) as bad:
                    eviction.move_away(path, bad)
            else:
                posix.flush(str(self.place.root))
                return
        raise CacheError(f"Other processes keep replacing {path} by copies that are bad", step=self.step)


def _write_holder(path: Path) -> None:
    """For messages only, so it may fail. Replaced whole, for a waiter may be reading it."""
    with contextlib.suppress(OSError):
        new = path.with_suffix(f".{os.getpid()}")
        new.write_text(f"process {os.getpid()} on {socket.gethostname()}")
        new.replace(path)


def _read_holder(path: Path) -> str:
    try:
        return path.read_text(errors="replace")[:200]
    except OSError:
        return ""


def _make_final(directory: Path) -> int:
    """Make the files read-only and everything durable, so that what has its name is whole even after a loss of power.
    Returns the size in bytes."""
    size_bytes, files, directories = 0, [], []
    for parent, _, names in os.walk(directory):
        directories.append(parent)
        for name in names:
            path = os.path.join(parent, name)
            status = os.lstat(path)
            if stat.S_ISREG(status.st_mode):
                os.chmod(path, stat.S_IMODE(status.st_mode) & ~0o222)
                size_bytes += status.st_size
                files.append(path)
    flush_files(files)
    for path in directories:
        posix.flush(path)
    return size_bytes


class _Turn:
    """Whose turn it is to download one key: one thread of this process, and one process of the node."""

    def __init__(self, path: Path) -> None:
        from filelock import FileLock

        self._threads = threading.Lock()  # the file lock counts, and lets every thread of its process in
        self._processes = FileLock(path, mode=0o600, thread_local=False, fallback_to_soft=False)

    def take(self) -> bool:
        """Take the turn if it is free. Raises OSError."""
        from filelock import Timeout

        if not self._threads.acquire(blocking=False):
            return False
        taken = False
        try:
            self._processes.acquire(blocking=False)
            taken = True
        except Timeout:
            """It is another process's."""
        finally:
            if not taken:
                self._threads.release()
        return taken

    def give_back(self) -> None:
        """The lock file stays: others wait for this very one."""
        self._processes.release()
        self._threads.release()


_turns: dict[Path, _Turn] = {}
os.register_at_fork(after_in_child=_turns.clear)


def _turn(path: Path) -> _Turn:
    """The one object of this process for a lock file."""
    return _turns.get(path) or _turns.setdefault(path, _Turn(path))
