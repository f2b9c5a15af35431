"""Warn before a disk is full because of what is saved to it."""

from __future__ import annotations

from ckptstore.events import DiskFillsUp, emit
from ckptstore.format.changes import Commit, Remove
from ckptstore.log import Log
from ckptstore.storage.base import Storage

_LEAST_SAVES, _RECORDS = 4, 32
"""The number of saves that show a growth, and the last records that are looked at for them."""
_WARN_SAVES = 10


def warn_of_full_disk(log: Log, storage: Storage, *, warned: int | None) -> int | None:
    """Emit `DiskFillsUp` if a disk has room for fewer than ten more saves at the growth of the last ones: the bytes
    that they brought without those that were deleted meanwhile.

    `warned` is what an earlier call has returned: the number that was last told. There is another event once it has
    halved. Where retention and prunes free as much as saves take, there is none.
    """
    free_bytes = storage.free_bytes()
    newest = None if free_bytes is None else log.newest()  # a request, on a storage that has no end
    if free_bytes is None or newest is None:
        return warned
    records = log.records(range(max(1, newest.number - _RECORDS + 1), newest.number + 1))
    commits = [record for record in records if isinstance(record.change, Commit) and record.change.thins is None]
    thinned = [record for record in records if isinstance(record.change, Commit) and record.change.thins is not None]
    dropped = [number for record in records if isinstance(record.change, Remove) for number in record.change.drop]
    if len(commits) < _LEAST_SAVES:
        return warned
    gone = log.records(dropped)
    grown_bytes = sum(it.entry.held_bytes for it in [*commits, *thinned]) - sum(it.entry.held_bytes for it in gone)
    bytes_per_save = grown_bytes // len(commits)
    if bytes_per_save <= 0:
        return None
    saves_left = free_bytes // bytes_per_save
    if saves_left >= _WARN_SAVES:
        return None
    if warned is not None and saves_left > warned // 2:
        return warned
    step = commits[-1].entry.step
    emit(DiskFillsUp(step=step, saves_left=saves_left, free_bytes=free_bytes, bytes_per_save=bytes_per_save))
    return saves_left
