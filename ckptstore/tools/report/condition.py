"""Find what a store has besides checkpoints: attempts without a commit, garbage, leases. Nothing is written."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from ckptstore.errors import CkptstoreError
from ckptstore.format.layout import CHECKPOINT_PREFIX, LEASE_PREFIX, Attempt
from ckptstore.format.record import Record
from ckptstore.job import Job
from ckptstore.storage.base import Disk, Storage
from ckptstore.tools.report.document import SeenLease, TornAttempt
from ckptstore.tools.report.history import Life
from ckptstore.upkeep.garbage import ListedAttempt, listed_attempts, look_for_garbage
from ckptstore.upkeep.leases import look

LISTED_FILES = 200_000
"""The most files to list: of more a listing takes minutes on an object store."""


@dataclass(slots=True, kw_only=True)
class Condition:
    """The findings of one look; all by this machine's clock, since only a write shows the storage's."""

    torn: list[TornAttempt] = field(default_factory=list)
    garbage_bytes: int = 0
    garbage_files: int = 0
    stored_bytes: int | None = None
    leases: list[SeenLease] = field(default_factory=list)
    trouble: list[str] = field(default_factory=list)


def look_around(job: Job, newest: Record, lives: Mapping[int, Life]) -> Condition:
    """List the files of a store, and sort what no checkpoint needs. What fails is trouble."""
    found = Condition()
    now_seconds = time.time()
    try:
        found.leases = _leases(job.storage, now_seconds)
    except CkptstoreError as error:
        found.trouble.append(f"the leases could not be listed: {error.message}")
    expected = sum(life.entry.num_files for life in lives.values() if life.status != "deleted")
    if expected > LISTED_FILES:
        found.trouble.append(
            f"the log speaks of {expected} files: more than {LISTED_FILES} are not listed here, so attempts without a"
            " commit and garbage are not known; `ckptstore gc --dry-run` looks for them"
        )
        return found
    try:
        listed = listed_attempts(job.storage)
    except CkptstoreError as error:
        found.trouble.append(
            f"the files could not be listed, so attempts without a commit and garbage are not known: {error.message}"
        )
        return found
    found.stored_bytes = sum(attempt.size_bytes for attempt in listed.values())
    left: dict[str, str] = {}
    try:
        garbage = look_for_garbage(job.log, job.storage, newest, listed, now_seconds=now_seconds)
        left = garbage.left
        found.garbage_bytes = garbage.size_bytes
        found.garbage_files = len(garbage.unfinished) + sum(listed[name].num_files for name in garbage.attempts)
    except CkptstoreError as error:
        found.trouble.append(f"garbage could not be told from what is needed: {error.message}")
    committed = {life.entry.attempt for life in lives.values()}
    last_at = max((life.entry.created_at for life in lives.values()), default=0.0)
    for directory in sorted(listed.keys() - committed):
        reason = left.get(CHECKPOINT_PREFIX + directory, "")
        found.torn.append(_torn(directory, listed[directory], newest, reason, last_at=last_at))
    return found


def _torn(directory: str, listed: ListedAttempt, newest: Record, reason: str, *, last_at: float) -> TornAttempt:
    attempt = Attempt.parse(directory)
    epoch = attempt.epoch if attempt else None
    is_owners = epoch is not None and epoch >= newest.state.epoch
    in_flight = is_owners and (listed.modified_seconds or last_at) >= last_at
    if in_flight:
        why = "the job that owns the store began it, and may commit it still; if that job is dead, its next start or"
        why += " `ckptstore gc --claim` takes over"
    elif is_owners:
        why = "the job that owns the store began it, and has committed another one since: it failed, or was given up"
    elif reason:
        why = f"left by garbage collection: {reason}"
    else:
        why = "nobody can commit it any more; `ckptstore gc` removes it"
    return TornAttempt(
        attempt=directory,
        step=attempt.step if attempt else None,
        epoch=epoch,
        size_bytes=listed.size_bytes,
        modified_at=listed.modified_seconds,
        in_flight=in_flight,
        why=why,
    )


def _leases(storage: Storage, now_seconds: float) -> list[SeenLease]:
    """Return the leases that are fresh. Only readers on a disk write any."""
    found = []
    living = look(storage, now_seconds=now_seconds, remember=False)[0] if isinstance(storage, Disk) else ()
    for number, file in living:
        holder = file.key.removeprefix(LEASE_PREFIX).partition("-")[2].removesuffix(".json")
        age_seconds = max(0.0, now_seconds - file.modified_seconds)
        found.append(SeenLease(holder=holder, number=number, age_seconds=age_seconds))
    return sorted(found, key=lambda lease: (lease.number, lease.holder))
