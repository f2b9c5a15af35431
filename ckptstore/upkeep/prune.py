"""Delete checkpoints in the trash once nobody can need them. A record first, then the bytes.

The order makes a crash harmless: after the `remove` record no reader finds the checkpoint, and of its directory the
manifest is deleted first. A crash leaves orphans, never a checkpoint with holes.

A reader takes a lease, on a disk or to follow, then reads the log; a prune writes its record, then reads the leases
before each deletion, on an object store once. So one of the two sees the other. A checkpoint that is still being read
stays, as an orphan too. The next prunes find orphans of their own epoch, and garbage collection finds all.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass

from ckptstore.config import StoreConfig
from ckptstore.errors import AccessDenied, CkptstoreError, FileMissing, StorageError, StoreFenced
from ckptstore.events import CheckpointsPruned, PruneFailed, emit
from ckptstore.format.changes import RESUMED_FROM, Claim, Commit, Remove
from ckptstore.format.layout import CHECKPOINT_PREFIX, MANIFEST_NAME, Attempt
from ckptstore.format.record import Record
from ckptstore.log import Log
from ckptstore.runtime.beat import beat
from ckptstore.runtime.shown import show_size
from ckptstore.storage.base import Disk, Storage
from ckptstore.storage.disk import posix
from ckptstore.upkeep import leases

logger = logging.getLogger("ckptstore")

_BATCH_RECORDS = 256
_MAY_DELETE = "may-delete"
"""The name of a file that never exists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trashed:
    """One checkpoint in the trash."""

    number: int
    step: int
    attempt: str
    size_bytes: int
    due_in_seconds: float
    """The time until its grace period is over; at most 0 if it is."""
    removed_by: int
    """The number of the record that put it there."""
    held_by: str | None
    """The reason for which it stays after its grace period; None if there is none."""

    @property
    def goes(self) -> bool:
        """True if a prune deletes it now."""
        return self.due_in_seconds <= 0 and self.held_by is None


def trash(log: Log, storage: Storage, *, grace_seconds: float) -> list[Trashed]:
    """Return the checkpoints in the trash, each with its reason to stay, if any. `prune` acts on this list."""
    return _trash_now(log, storage, grace_seconds=grace_seconds, just_committed=False)[0]


def _trash_now(
    log: Log, storage: Storage, *, grace_seconds: float, just_committed: bool
) -> tuple[list[Trashed], float]:
    """Return what `trash` does, and the time of the storage.

    With `just_committed` the time of the newest record is the present: nothing is written to learn the time.
    """
    newest = log.newest()
    if newest is None or not newest.state.trash:
        return [], 0.0
    now_seconds = log.record_time(newest.number) if just_committed else log.store_now_seconds()
    held = _held(newest, leases.fresh(storage, now_seconds=now_seconds))
    since = dict.fromkeys(newest.state.trash.values(), now_seconds)
    for number in since:
        with suppress(FileMissing):  # in a replica, it is not here yet
            since[number] = log.record_time(number)
    found = []
    for record in log.readable(sorted(newest.state.trash)):
        age_seconds = now_seconds - since[newest.state.trash[record.number]]
        found.append(
            Trashed(
                number=record.number,
                step=record.entry.step,
                attempt=record.entry.attempt,
                size_bytes=record.entry.size_bytes,
                due_in_seconds=grace_seconds - age_seconds,
                removed_by=newest.state.trash[record.number],
                held_by=held.get(record.number),
            )
        )
    return found, now_seconds


def _held(newest: Record, readers: Mapping[int, int]) -> dict[int, str]:
    state = newest.state
    held = {number: f"{len(users)} checkpoints refer to it" for number, users in state.bases.items()}
    if state.resume_from is not None:
        held[state.resume_from] = RESUMED_FROM
    return held | {number: f"{count} readers hold a lease" for number, count in readers.items()}


def prune(
    log: Log,
    storage: Storage,
    config: StoreConfig,
    *,
    epoch: int | None,
    dry_run: bool = False,
    behind_save: bool = False,
) -> list[Trashed]:
    """Delete the checkpoints that were in the trash for the grace period, and return them; a dry run only returns them.

    One that runs `behind_save` takes the time of the newest record for the present, and looks for what earlier ones
    have left only where this process may have left something: that takes a look at all directories.

    `epoch` is the caller's writer epoch; None for a command line, which fences nobody and is fenced by nobody. Raises
    StoreFenced, and deletes nothing, if a later job has claimed the store; AccessDenied, after the deletion of the
    others, if the storage does not let this process delete some: they stay in the trash.
    """
    found, now_seconds = _trash_now(log, storage, grace_seconds=config.grace_seconds, just_committed=behind_save)
    due = [item for item in found if item.goes]
    if dry_run:
        return due
    reason = "grace period over"
    gone = _remove(log, storage, due, epoch=epoch, reason=reason, now_seconds=now_seconds) if due else []
    if log.may_have_left_over or not behind_save:
        log.may_have_left_over = _remove_left_over(log, storage, epoch=epoch)
    return gone


def _deletable(storage: Storage, items: Collection[Trashed]) -> tuple[list[Trashed], AccessDenied | None]:
    """Return the checkpoints that this process may delete, and an error that tells of the others, if any.

    On a disk the right is that of each directory; elsewhere that of the first one counts for all.
    """
    # After the `remove` record nobody finds them any more: what may not be deleted would lie there unseen for ever.
    denied: list[Trashed] = []
    why = ""
    for item in items if isinstance(storage, Disk) else list(items)[:1]:
        try:
            _check_may_delete(storage, f"{CHECKPOINT_PREFIX}{item.attempt}/")
        except AccessDenied as error:
            why = why or error.message
            denied.append(item)
    if not denied:
        return list(items), None
    if not isinstance(storage, Disk):
        denied = list(items)
    size = show_size(sum(item.size_bytes for item in denied))
    steps = ", ".join(str(item.step) for item in denied[:5]) + (" …" if len(denied) > 5 else "")
    refusal = AccessDenied(
        f"Checkpoints stay in the trash (step {steps}; {size}), for this process may not delete them: {why}",
        hint="They take room until a user who may delete them calls `ckptstore prune`",
    )
    return [item for item in items if item not in denied], refusal


def _check_may_delete(storage: Storage, prefix: str) -> None:
    """Raise AccessDenied if this process may not delete the files of a directory. Deletes nothing."""
    key = prefix + MANIFEST_NAME
    if not isinstance(storage, Disk):
        storage.delete([f"{prefix}{_MAY_DELETE}"])  # servers look at the right before they look for the file
        return
    try:
        os.rmdir(storage.local_path(key))  # of a file: the system checks the right first, then what it is
    except OSError as error:
        if error.errno in posix.DENIED:
            raise AccessDenied(f"{storage.local_path(key)}: {error.strerror}", file=key) from error


def empty_trash(log: Log, storage: Storage, *, epoch: int | None) -> None:
    """Delete everything in the trash that nothing holds, whatever its age, when the disk is about to overflow."""
    found, now_seconds = _trash_now(log, storage, grace_seconds=0.0, just_committed=False)
    due = [item for item in found if item.held_by is None]
    if due:
        try:
            _remove(log, storage, due, epoch=epoch, reason="the disk was full", now_seconds=now_seconds)
        except AccessDenied as error:
            emit(PruneFailed(error=str(error)))  # the room that there is then decides
        except CkptstoreError as error:
            error.committed = False  # it is said of the checkpoint that needs the room
            raise


def _remove(
    log: Log,
    storage: Storage,
    items: Collection[Trashed],
    *,
    epoch: int | None,
    reason: str,
    now_seconds: float,
) -> list[Trashed]:
    started = time.monotonic()
    items, denied = _deletable(storage, items)
    if denied is not None and not items:
        raise denied

    def decide(newest: Record | None) -> Remove | None:
        if newest is None or (epoch is not None and newest.state.epoch != epoch):
            found = newest.state.epoch if newest else 0
            raise StoreFenced(f"A later job has claimed the store (writer epoch {found}), so nothing was pruned")
        # Since the list was made, one may have been restored and trashed anew, and another one is read.
        trash, read = newest.state.trash, leases.fresh(storage, now_seconds=now_seconds)
        same = [one.number for one in items if trash.get(one.number) == one.removed_by and one.number not in read]
        still = newest.state.droppable(same)
        return Remove(drop=still, epoch=epoch, reason=reason) if still else None

    record = log.append(decide)
    if record is None:
        return []
    assert isinstance(record.change, Remove)
    dropped = {item.attempt: item for item in items if item.number in record.change.drop}
    left = delete_attempts(log, storage, record, dropped)
    log.may_have_left_over |= bool(left)
    gone = [item for attempt, item in dropped.items() if attempt not in left]
    steps = tuple(item.step for item in gone)
    size_bytes = sum(item.size_bytes for item in gone)
    emit(CheckpointsPruned(steps=steps, size_bytes=size_bytes, seconds=time.monotonic() - started))
    for attempt, why in left.items():
        emit(PruneFailed(error=f"step {dropped[attempt].step} stays in {CHECKPOINT_PREFIX}{attempt}: {why}"))
    if denied is not None:
        raise denied
    return gone


def _remove_left_over(log: Log, storage: Storage, *, epoch: int | None) -> bool:
    """On a disk: delete the directories that earlier prunes of this epoch left to readers or could not delete. Return
    True if some are still left."""
    directories = attempt_directories(storage)
    newest = log.checked_newest() if directories else None
    if newest is None or (epoch is not None and newest.state.epoch != epoch):
        return False
    named = {record.entry.attempt for record in log.records([*newest.state.live, *newest.state.trash])}
    dropped = dropped_attempts(log, newest, directories - named)
    left = delete_attempts(log, storage, newest, dropped)
    for attempt, why in left.items():
        logger.debug("%s%s stays: %s", CHECKPOINT_PREFIX, attempt, why)
    return bool(left)


def attempt_directories(storage: Storage) -> set[str]:
    """On a disk: return the directory names below the root of checkpoints, with empty ones, which no listing shows."""
    if not isinstance(storage, Disk):
        return set()
    try:
        with os.scandir(storage.local_path(CHECKPOINT_PREFIX.rstrip("/"))) as entries:  # a look at none by itself
            return {entry.name for entry in entries if entry.is_dir()}
    except OSError:
        return set()


def dropped_attempts(log: Log, newest: Record, unnamed: Collection[str]) -> list[str]:
    """Return those of the directories `unnamed` that were committed in the present epoch.

    No live or trashed checkpoint names these directories, so they were dropped since, and no attempt is committed
    twice. All records of the epoch are read if there is a candidate.
    """
    epoch = newest.state.epoch
    wanted = {name for name in unnamed if (attempt := Attempt.parse(name)) is not None and attempt.epoch == epoch}
    found: list[str] = []
    for record in backwards(log, newest) if wanted else ():
        if isinstance(record.change, Commit) and record.entry.attempt in wanted:
            found.append(record.entry.attempt)
        # Before this claim no directory of the epoch can have been committed.
        if isinstance(record.change, Claim) or len(found) == len(wanted):
            break
    return found


def backwards(log: Log, newest: Record, *, may_lack: bool = False) -> Iterator[Record]:
    """Iterate over all records, newest first, reading them in batches; with `may_lack` over those that are
    `readable`."""
    read = log.readable if may_lack else log.records
    for end in range(newest.number, 0, -_BATCH_RECORDS):
        yield from reversed(read(range(max(1, end - _BATCH_RECORDS + 1), end + 1)))


def delete_attempts(log: Log, storage: Storage, newest: Record, attempts: Collection[str]) -> dict[str, str]:
    """Delete the directories that nobody reads, and return those that stay, with the reason.

    Call it after the record that dropped them, or if they can never be committed. A lacking right is a reason to stay,
    and on a disk any error of deletion; on other storages those are raised, as StorageError.
    """
    left: dict[str, str] = {}
    is_disk = isinstance(storage, Disk)
    now_seconds = log.store_now_seconds() if attempts else 0.0
    read = set() if is_disk or not attempts else _leased(log, storage, newest, now_seconds=now_seconds)
    for attempt in attempts:
        beat()
        # Readers may have come since the last one was deleted. On a disk this look costs no request.
        if is_disk:
            read = _leased(log, storage, newest, now_seconds=now_seconds)
        if attempt in read:
            left[attempt] = "somebody reads it"
            continue
        try:
            delete_attempt(storage, attempt)
        except StorageError as error:
            if not is_disk and not isinstance(error, AccessDenied):
                raise
            left[attempt] = str(error)
    return left


def _leased(log: Log, storage: Storage, newest: Record, *, now_seconds: float) -> set[str]:
    """Return the directories that somebody reads, and those that hold files of these checkpoints."""
    numbers = [number for number in leases.fresh(storage, now_seconds=now_seconds) if number <= newest.number]
    read = [record.entry for record in log.records(numbers) if isinstance(record.change, Commit)]
    bases = log.records({base for entry in read for base in entry.bases})
    return {entry.attempt for entry in (*read, *(record.entry for record in bases))}


def delete_attempt(storage: Storage, attempt: str) -> None:
    """Delete an attempt's directory, the manifest first, so that no manifest ever lacks files.

    Raises StorageError if anything stays on a disk.
    """
    prefix = f"{CHECKPOINT_PREFIX}{attempt}/"
    # Whoever is stopped in between leaves files without a manifest, which are garbage and never a checkpoint.
    storage.delete([prefix + MANIFEST_NAME])
    storage.delete([file.key for file in storage.list(prefix)])
    if isinstance(storage, Disk):
        storage.remove_directories(prefix.rstrip("/"))
        path = storage.local_path(prefix.rstrip("/"))
        if os.path.lexists(path):
            found = next((str(item) for item in path.rglob("*") if item.is_symlink() or not item.is_dir()), "")
            what = "a symbolic link" if os.path.islink(found) else "not of this checkpoint, or is in use"
            raise StorageError(f"{found or path} is {what}", hint="Look what it is, and remove it by hand")
