"""Remove copies from the node cache: those unread for long, then the least recently used ones until the rest fits the
budget, or until a download has room. A copy that somebody reads always stays."""

from __future__ import annotations

import contextlib
import os
import re
import time
from contextlib import AbstractContextManager, nullcontext

from ckptstore.config import CacheConfig
from ckptstore.errors import CacheError, StorageFull
from ckptstore.node_cache import readers
from ckptstore.node_cache.place import CachePlace
from ckptstore.runtime.file_locks import Exclusive

KEY = re.compile(r"[0-9a-f]{64}")

_SPARE_FRACTION = 0.02
_SPARE_BYTES = 64 << 20
"""The bytes that a download needs beyond those of its files: for partly filled blocks, directories, and some margin."""


_OTHERS_SECONDS = 60.0
"""The longest time that a download without room waits for another process that is evicting."""
_POLL_SECONDS = 0.05


def make_room(place: CachePlace, *, size_bytes: int, step: int) -> None:
    """Evict copies until a download of that size fits. Raises StorageFull naming the bytes."""
    needed_bytes = int(size_bytes * (1 + _SPARE_FRACTION)) + _SPARE_BYTES
    deadline = time.monotonic() + _OTHERS_SECONDS
    while (free_bytes := place.free_bytes()) < needed_bytes:
        with place.using(), _one_at_a_time(place) as ours:
            removed = ours and any(remove(place, key) for _, _, key in _unread(place))
        if (ours and not removed) or time.monotonic() > deadline:
            raise StorageFull(
                f"The node cache {place.root} needs {needed_bytes:,} bytes for a copy of {size_bytes:,} bytes, "
                f"{free_bytes:,} bytes are free",
                step=step,
                hint="Make room, or set CKPTSTORE_CACHE_DIR to a larger disk of this node",
            )
        if not ours:
            time.sleep(_POLL_SECONDS)


def evict(place: CachePlace, config: CacheConfig) -> None:
    """Remove copies that are idle for too long or over the budget. Best effort: failures are tried again next time."""
    again = place.lock("evict").with_suffix(".again")
    with contextlib.suppress(OSError):
        again.touch(mode=0o600)  # before the lock is tried: its holder looks for this after giving it back
    with contextlib.suppress(OSError, CacheError):
        wanted = True
        while wanted:
            with _one_at_a_time(place) as ours:
                if not ours:
                    return
                again.unlink(missing_ok=True)
                _evict_now(place, config)
            wanted = again.exists()


def _evict_now(place: CachePlace, config: CacheConfig) -> None:
    copies, now = _unread(place), time.time()
    total_bytes = sum(size_bytes for _, size_bytes, _ in copies)
    budget_bytes = config.cache_budget_bytes or (place.free_bytes() + total_bytes) // 2
    for used_seconds, size_bytes, key in copies:
        idle = now - used_seconds > config.cache_idle_seconds
        if (idle or total_bytes > budget_bytes) and remove(place, key):
            total_bytes -= size_bytes
    _forget_lost(place)


def remove(place: CachePlace, key: str) -> bool:
    """Remove a copy unless somebody reads it; return True if it is gone."""
    with readers.private_directory(place) as private:
        with readers.excluding_readers(place, key) as unread:
            if not unread:
                return False
            with contextlib.suppress(FileNotFoundError):
                os.rename(place.copy(key), private)
            readers.forget(place, key)
        return True  # the private directory is removed with the context


def _forget_lost(place: CachePlace) -> None:
    """Remove leases and locks of copies that do not exist."""
    beside = {path.name.partition(".")[0] for name in ("locks", "leases") for path in (place.root / name).iterdir()}
    for key in filter(KEY.fullmatch, beside):
        if not place.copy(key).exists():
            with readers.excluding_readers(place, key) as unread:
                if unread and not place.copy(key).exists():
                    readers.forget(place, key)


def _unread(place: CachePlace) -> list[tuple[float, int, str]]:
    """List the last use, the size and the key of the copies that nobody reads, the least recently used first."""
    found = []
    for path in place.root.iterdir():
        if not KEY.fullmatch(path.name):
            continue
        with contextlib.suppress(FileNotFoundError):
            with readers.excluding_readers(place, path.name) as unread:
                if not unread:
                    continue
            found.append((*readers.last_use(place, path.name), path.name))
    return sorted(found)


def _one_at_a_time(place: CachePlace) -> AbstractContextManager[bool]:
    """Yield True in one process at a time, else False; two that evict at once would remove more than is needed."""
    return Exclusive(place.lock("evict")).held() if place.locks_work else nullcontext(False)
