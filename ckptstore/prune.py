"""Pruning: what retention put in the trash is deleted once nobody can need it. A record first, then the bytes.

The order makes a crash harmless: after the `remove` record no reader finds the checkpoint; of its directory the
manifest goes first. What a crash leaves are orphans for garbage collection, never a checkpoint with holes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from ckptstore import leases
from ckptstore.config import StoreConfig
from ckptstore.errors import StoreFenced
from ckptstore.events import CheckpointsPruned, emit
from ckptstore.group import Beat
from ckptstore.layout import CHECKPOINT_PREFIX, MANIFEST_NAME
from ckptstore.log import Log
from ckptstore.records import Record, Remove
from ckptstore.storage.base import HasLocalFiles, Storage

logger = logging.getLogger("ckptstore")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trashed:
    """One checkpoint in the trash."""

    number: int
    step: int
    attempt: str
    size_bytes: int
    due_in_seconds: float
    """Until its grace period is over; at most 0 when it is."""
    held_by: str | None
    """Why it stays although its time is over, None when nothing holds it."""

    @property
    def goes(self) -> bool:
        """Whether a prune deletes it now."""
        return self.due_in_seconds <= 0 and self.held_by is None


def trash(log: Log, storage: Storage, *, grace_seconds: float) -> list[Trashed]:
    """What is in the trash, and what keeps it there. This is the plan that `prune` runs."""
    newest = log.newest()
    if newest is None or not newest.state.trash:
        return []
    now_seconds = log.store_now_seconds()
    held = _held(newest, leases.fresh(storage, now_seconds=now_seconds))
    since = {number: log.record_time(number) for number in set(newest.state.trash.values())}
    found = []
    for record in log.records(sorted(newest.state.trash)):
        age_seconds = now_seconds - since[newest.state.trash[record.number]]
        found.append(
            Trashed(
                number=record.number,
                step=record.entry.step,
                attempt=record.entry.attempt,
                size_bytes=record.entry.size_bytes,
                due_in_seconds=grace_seconds - age_seconds,
                held_by=held.get(record.number),
            )
        )
    return found


def _held(newest: Record, readers: Mapping[int, int]) -> dict[int, str]:
    state = newest.state
    held = {number: f"{len(users)} checkpoints refer to it" for number, users in state.bases.items()}
    if state.resume_from is not None:
        held[state.resume_from] = "the running job resumed from it"
    return held | {number: f"{count} readers hold a lease" for number, count in readers.items()}


def prune(
    log: Log, storage: Storage, config: StoreConfig, *, epoch: int | None, dry_run: bool = False
) -> list[Trashed]:
    """Delete what has been in the trash for the grace period, and return it; a dry run returns the same plan.

    `epoch` is the caller's writer epoch, None for a command line, which fences nobody and is fenced by nobody. Raises
    StoreFenced when a later job has claimed the store: nothing is deleted then.
    """
    due = [item for item in trash(log, storage, grace_seconds=config.grace_seconds) if item.goes]
    if due and not dry_run:
        _remove(log, storage, due, epoch=epoch, reason="grace period over")
    return due


def empty_trash(log: Log, storage: Storage, *, epoch: int | None, beat: Beat) -> None:
    """Delete everything in the trash that nothing holds, however young: for a disk that is about to overflow."""
    due = [item for item in trash(log, storage, grace_seconds=0.0) if item.held_by is None]
    if due:
        _remove(log, storage, due, epoch=epoch, reason="the disk was full", beat=beat)


def _remove(
    log: Log,
    storage: Storage,
    items: Collection[Trashed],
    *,
    epoch: int | None,
    reason: str,
    beat: Beat = lambda: None,
) -> None:
    started = time.monotonic()

    def decide(newest: Record | None) -> Remove | None:
        if newest is None or (epoch is not None and newest.state.epoch != epoch):
            found = newest.state.epoch if newest else 0
            raise StoreFenced(f"A later job has claimed the store (writer epoch {found}), so nothing was pruned")
        still = newest.state.droppable(item.number for item in items)
        return Remove(drop=still, epoch=epoch, reason=reason) if still else None

    record = log.append(decide)
    if record is None:
        return
    assert isinstance(record.change, Remove)
    gone = [item for item in items if item.number in record.change.drop]
    for item in gone:
        delete_attempt(storage, item.attempt)
        beat()
    steps = tuple(item.step for item in gone)
    size_bytes = sum(item.size_bytes for item in gone)
    emit(CheckpointsPruned(steps=steps, size_bytes=size_bytes, seconds=time.monotonic() - started))


def delete_attempt(storage: Storage, attempt: str) -> None:
    """Delete an attempt's directory: the manifest first, so that it is never a manifest with holes."""
    prefix = f"{CHECKPOINT_PREFIX}{attempt}/"
    storage.delete([prefix + MANIFEST_NAME])
    storage.delete([file.key for file in storage.list(prefix)])
    if isinstance(storage, HasLocalFiles):
        storage.remove_directories(prefix.rstrip("/"))
