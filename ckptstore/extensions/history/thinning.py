"""Thin a checkpoint: drop some keys of its state, mostly those of the optimizer, and keep the rest.

The thinned checkpoint is written into a directory of its own, and one record of the log puts it in the place of the
whole one, which goes to the trash. So a crash leaves the whole one or the thinned one, never a mixture: before the
record the new directory is garbage, and after it the old one is trash like any other, which a prune deletes and
`restore` brings back.

No file is read or written again: those with what stays are linked on a disk, and copied inside other storages, and
those with nothing but dropped keys are left behind. A file that has both is refused.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from ckptstore.errors import CheckpointGone, CkptstoreError, FileMissing, InvalidInput, StoreFenced
from ckptstore.extensions.history.thinned_index import StockLeft, divided_keys, files_left, left_index
from ckptstore.format.changes import Commit
from ckptstore.format.entry import CheckpointEntry, Thinning
from ckptstore.format.layout import DCP_METADATA_NAME, USER_METADATA_NAME, Attempt, check_step
from ckptstore.format.manifest import Manifest, Receipt, sorted_receipts
from ckptstore.format.record import Record
from ckptstore.job import Job, record_of_step
from ckptstore.loading.checkpoint_files import CheckpointFiles, CommittedFiles, files_of
from ckptstore.loading.index_read import read_whole
from ckptstore.loading.load_state import open_any
from ckptstore.loading.restoring import check_has_trash
from ckptstore.saving.commit import entry_of, write_manifest
from ckptstore.saving.shard import Contents
from ckptstore.state.live.patterns import patterns_of
from ckptstore.storage.base import adopt
from ckptstore.transfer.moves import write_small
from ckptstore.upkeep import leases
from ckptstore.upkeep.prune import delete_attempt

logger = logging.getLogger("ckptstore")


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinReport:
    """The result of thinning a checkpoint, or of a dry run."""

    step: int
    dropped: tuple[str, ...]
    """The patterns."""
    num_keys: int
    """The keys of tensors and plain values that fit them."""
    size_bytes: int
    """The bytes of the files before."""
    left_bytes: int
    """The bytes of the files of the thinned checkpoint."""

    @property
    def freed_bytes(self) -> int:
        """The bytes that a prune frees once the whole checkpoint has been in the trash for the grace period."""
        return self.size_bytes - self.left_bytes


def thin(job: Job, step: int, drop: Any, *, force: bool = False, dry_run: bool = False) -> ThinReport:
    """Drop the keys that fit a pattern from the live checkpoint of a step; see `Catalogue.thin`."""
    step = check_step(step)
    patterns = patterns_of(() if drop is None else drop, name="drop") or ()
    check_has_trash(job)
    newest = job.log.newest()
    if newest is not None and job.epoch is not None and newest.state.epoch != job.epoch:
        raise StoreFenced(f"A later job has claimed the store (writer epoch {newest.state.epoch}): nothing was thinned")
    record = record_of_step(job.log, newest, step)
    if record.entry.thinned is not None and set(patterns) <= {*record.entry.thinned.dropped}:
        raise InvalidInput(f"Step {step} {record.entry.thinned}: nothing is left to drop", step=step)
    _refuse(job, newest, record, force=force)
    if not force and (count := _readers(job).get(record.number, 0)):
        raise InvalidInput(
            f"Step {step} was not thinned: {count} readers hold a lease",
            step=step,
            hint="Wait for them, or for 10 minutes if they were killed. With force it is thinned, and they go on",
        )
    files = files_of(job, record)
    with files.held():
        whole, _ = files.read_manifest()
        left = _left_of(files, whole, patterns)
        left_bytes = sum(it.size_bytes for it in left.taken) + sum(len(data) for data, _ in left.written.values())
        report = ThinReport(
            step=step,
            dropped=patterns,
            num_keys=left.num_dropped,
            size_bytes=whole.size_bytes,
            left_bytes=left_bytes,
        )
        if dry_run or newest is None:
            return report
        attempt = Attempt(step, newest.state.epoch, secrets.token_hex(4))
        try:
            entry = _write(job, files, whole, left, attempt, patterns)
            _commit(job, record, entry, force=force)
        except CkptstoreError as error:
            if error.committed is False:  # else the directory may be that of a checkpoint
                with suppress(CkptstoreError):  # then it is garbage after the next claim
                    delete_attempt(job.storage, str(attempt))
            raise
    logger.info("step %d was thinned: %s dropped, %d bytes less", step, ", ".join(patterns), report.freed_bytes)
    return report


def thin_as_decided(
    job: Job, decided: Mapping[int, Sequence[str]], *, dry_run: bool = False
) -> dict[int, CkptstoreError]:
    """Drop the keys that fit from the checkpoints with these numbers, and return the errors by step; a dry run finds
    those alone that come before anything is written.

    Checkpoints of files, which have no keys, stay as they are, and so do those with files that others refer to, and
    those that somebody reads, as long as these do. One that failed is not tried again by this process.
    """
    failed: dict[int, CkptstoreError] = {}
    for record in job.log.records(number for number in decided if decided[number] and number not in job.unthinned):
        entry = record.entry
        drops = [one for one in decided[record.number] if entry.thinned is None or one not in entry.thinned.dropped]
        newest = job.log.newest()
        if entry.kind != "state" or not drops or newest is None or newest.state.bases.get(record.number):
            continue
        if record.number in _readers(job):
            continue
        try:
            if entry.thinned is not None:  # by other patterns, which may have dropped the same keys
                keys = open_any(files_of(job, record)).all_keys()
                drops = [one for one in drops if any(fnmatchcase(key, one) for key in keys)]
            if not drops:
                job.unthinned.add(record.number)
            elif record_of_step(job.log, newest, entry.step).number == record.number:
                thin(job, entry.step, drops, dry_run=dry_run)
        except (CheckpointGone, StoreFenced):
            raise
        except CkptstoreError as error:
            job.unthinned.add(record.number)
            failed[entry.step] = error
    return failed


def _readers(job: Job) -> dict[int, int]:
    """Return the number of readers with a fresh lease by the number of what they read."""
    return leases.fresh(job.storage, now_seconds=job.log.store_now_seconds())


def _refuse(job: Job, newest: Record | None, record: Record, *, force: bool) -> None:
    """Raise InvalidInput if a checkpoint must stay whole."""
    if newest is None:
        return
    state, number, step = newest.state, record.number, record.entry.step
    reasons = state.protected(latest=state.latest)
    is_needed = number in (state.latest, state.resume_from)
    why = reasons.get(number, "") if is_needed or not force else ""
    users = [] if force else [user.entry.step for user in job.log.records(state.bases.get(number, ()))]
    why = why or (f"step {', '.join(map(str, users))} refers to its files" if users else "")
    if why:
        raise InvalidInput(
            f"Step {step} was not thinned: {why}",
            step=step,
            hint="A job must be able to resume from it" if is_needed else "With force it is thinned all the same",
        )


def _commit(job: Job, record: Record, entry: CheckpointEntry, *, force: bool) -> None:
    """Put the thinned checkpoint in the place of the whole one."""

    def change(newest: Record | None) -> Commit:
        found = record_of_step(job.log, newest, entry.step)
        if found.number != record.number:
            raise InvalidInput(f"Step {entry.step} was saved again while it was thinned", step=entry.step)
        _refuse(job, newest, found, force=force)
        return Commit(entry, thins=record.number)

    job.log.append(change, commits=Attempt.of(entry.attempt))


class _Left(NamedTuple):
    """The contents of the thinned checkpoint."""

    taken: list[Receipt]
    """The files of the whole one that it has too."""
    written: dict[str, tuple[bytes, int]]
    """The new files, each of a rank."""
    num_dropped: int
    algorithm: str
    """The algorithm of the digests."""


def _left_of(files: CommittedFiles, whole: Manifest, patterns: tuple[str, ...]) -> _Left:
    """Return what is left without the keys that fit a pattern. Raises InvalidInput if whole files cannot make it up."""
    step, by_name = files.step, whole.by_name
    index = read_whole(files, whole)
    if index is None or index.outline is None:
        raise InvalidInput(
            f"Step {step} is a checkpoint of files, and has no keys to drop", step=step,
            hint="Remove it as a whole, with `ckptstore rm`",
        )  # fmt: skip
    dropped, left = divided_keys(index, patterns)
    stock = None
    if (receipt := by_name.get(DCP_METADATA_NAME)) is not None:
        stock = StockLeft(files.read_file(receipt), index, dropped, left)
    names = files_left(index, dropped, stock.frames.values() if stock else (), step=step)
    data = {name for name in by_name if name.endswith(".distcp")}.union(index.files)
    if data <= names:
        raise InvalidInput(f"Thinning step {step} would free nothing: no file holds only what fits", step=step)
    thinned, made = left_index(index, index.outline, dropped, left)
    if stock:
        made[DCP_METADATA_NAME] = stock.encode(thinned), 0
    taken = [
        receipt
        for name, receipt in by_name.items()
        if (name in names or name not in data)
        and name not in made
        and not (name.startswith("digests-rank=") and name.endswith(".json"))  # the next save builds on the latest
    ]
    thinned.check_files({receipt.name: receipt.size_bytes for receipt in taken})
    thinned.check_complete()
    return _Left(taken, made, len(dropped), index.parts[0].algorithm)


def _write(
    job: Job, files: CommittedFiles, whole: Manifest, left: _Left, attempt: Attempt, patterns: tuple[str, ...]
) -> CheckpointEntry:
    """Write the thinned checkpoint into its directory, with its manifest, and return its entry."""
    storage, before, entry = job.storage, whole.thinned, files.record.entry
    moves = [(files.key_of(receipt), attempt.key(receipt.name)) for receipt in left.taken]
    if adopt(storage, moves, num_threads=job.transfer.num_tasks):
        raise InvalidInput(
            f"{storage.uri} cannot copy files by itself, so thinning would download and upload what stays",
            step=entry.step,
        )
    receipts = [receipt._replace(attempt=None) for receipt in left.taken]
    receipts += write_small(job.transfer.upload, attempt, left.written, algorithm=left.algorithm)
    thinning = Thinning(
        dropped=tuple(dict.fromkeys((*(before.dropped if before else ()), *patterns))),
        attempt=before.attempt if before else entry.attempt,
        size_bytes=before.size_bytes if before else whole.size_bytes,
        thinned_at=time.time(),
    )
    manifest = replace(
        whole, epoch=attempt.epoch, attempt=str(attempt), files=tuple(sorted_receipts(receipts)), thinned=thinning
    )
    data = manifest.encode()
    CheckpointFiles(storage=storage, transfer=job.transfer, config=job.config, prefix=attempt.prefix).check_complete(
        manifest
    )
    pending = [receipt.name for receipt in receipts]
    with suppress(FileMissing):
        storage.write(attempt.key(USER_METADATA_NAME), [memoryview(storage.read(files.prefix + USER_METADATA_NAME))])
        pending.append(USER_METADATA_NAME)
    write_manifest(storage, job.config, attempt, Contents(receipts, manifest.directories, pending), data)
    return replace(
        entry_of(manifest, data),
        epoch=entry.epoch,
        save_number=entry.save_number,
        committed_at=job.log.commit_times([files.record])[files.record.number],
    )
