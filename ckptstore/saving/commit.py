"""Commit a checkpoint: write the manifest, then the one record that makes it visible. Runs on the leader alone."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from operator import call
from typing import Any

from ckptstore.config import StoreConfig
from ckptstore.errors import CheckpointGone, FileMissing, InvalidInput, StorageError
from ckptstore.events import CheckpointCommitted, emit
from ckptstore.format.changes import Commit
from ckptstore.format.entry import CheckpointEntry
from ckptstore.format.layout import MANIFEST_NAME, PART_NAME, Attempt
from ckptstore.format.manifest import Manifest, Receipt, sha256_of, sorted_receipts
from ckptstore.format.record import Record
from ckptstore.job import Job, held_by_bases
from ckptstore.retention import Candidate, KeepAll, Verdict, decide
from ckptstore.runtime.beat import beat
from ckptstore.runtime.parallel import mapped
from ckptstore.saving.request import Request
from ckptstore.saving.shard import Contents
from ckptstore.storage.base import Disk, Storage
from ckptstore.storage.second_look import created, looked_twice

logger = logging.getLogger("ckptstore")

_LATE_SECONDS = 0.2
"""Between two looks at a file of another node that this one does not see yet."""


def commit(
    job: Job,
    request: Request,
    attempt: Attempt,
    contents: Contents,
    *,
    after: int | None = None,
    world_size: int | None = None,
) -> Record:
    """Publish the stored files as the next record of the log; retention decides in the same step.

    `after` is the number of a record: InvalidInput is raised if a checkpoint was committed later than that.
    `world_size` is the number of ranks that stored files, if they are not the ranks of the job's group.
    """
    # What a rank says it has stored may be on a disk that this leader does not see: no record may name such files.
    check_stored(job.storage, job.config, attempt, contents.receipts, rank=job.group.rank)
    beat()
    world_size = job.group.world_size if world_size is None else world_size
    config, store_id = job.config, job.store_id()
    manifest = manifest_of(request, attempt, contents, config, store_id=store_id, world_size=world_size)
    data = manifest.encode()
    write_manifest(job.storage, job.config, attempt, contents, data, counts=False)

    def change(newest: Record | None) -> Commit:
        if after is not None and newest is not None:
            _refuse_overtaken(job.log.records(range(after + 1, newest.number + 1)), request.step)
        # On a disk `begin` has looked: a `stat` costs nothing there. Here it goes beside the requests of the append.
        if newest is not None and not isinstance(job.storage, Disk):
            job.check_latest_there(newest)
        return change_of(job, newest, entry, bases)

    entry, bases = entry_of(manifest, data), manifest.references.union(contents.bases)
    return job.log.append(change, commits=attempt)


def entry_of(manifest: Manifest, data: bytes) -> CheckpointEntry:
    """Return the entry of the record for the manifest with these bytes."""
    return CheckpointEntry(
        step=manifest.step,
        epoch=manifest.epoch,
        attempt=manifest.attempt,
        manifest_sha256=sha256_of(data),
        kind=manifest.kind,
        metrics=manifest.metrics,
        size_bytes=manifest.size_bytes,
        num_files=len(manifest.files),
        world_size=manifest.world_size,
        created_at=manifest.created_at,
        own_bytes=sum(it.size_bytes for it in manifest.files if it.attempt is None) if manifest.references else None,
        thinned=manifest.thinned,
    )


def tell(record: Record, storage: Storage, *, rank: int, seconds: float, slowest: Mapping[str, Any] = {}) -> None:
    """Any rank: emit the event of the commit after a successful save. `slowest` as in `Ended.slowest`."""
    entry = record.entry
    emit(
        CheckpointCommitted(
            step=entry.step,
            number=record.number,
            rank=rank,
            size_bytes=entry.size_bytes,
            seconds=seconds,
            world_size=entry.world_size,
            **slowest,
            store=storage.uri,
            attempt=entry.attempt,
            manifest_sha256=entry.manifest_sha256,
            created_at=entry.created_at,
            metrics=dict(entry.metrics),
        )
    )


def _refuse_overtaken(since: Sequence[Record], step: int) -> None:
    """Raise InvalidInput if one of these records commits a checkpoint."""
    # Saves have one order, and a save that torch runs cannot be waited for: the one that ends too late fails.
    committed = [record.entry.step for record in since if isinstance(record.change, Commit)]
    if committed:
        raise InvalidInput(
            f"Step {committed[-1]} was committed while step {step} was being saved",
            step=step,
            hint="Let one save end before the next begins",
        )


def manifest_of(
    request: Request, attempt: Attempt, contents: Contents, config: StoreConfig, *, store_id: str, world_size: int
) -> Manifest:
    """Build the manifest of the attempt. Call it right before writing, so that the timings are complete."""
    extra: dict[str, Any] = {} if contents.timings is None else {"timings": contents.timings().to_json()}
    if contents.casts:
        extra["casts"] = dict(contents.casts)
    if config.provenance:
        from ckptstore.program import provenance

        extra["provenance"] = provenance(num_hosts=contents.num_hosts).to_json()
    return Manifest(
        store_id=store_id,
        step=request.step,
        epoch=attempt.epoch,
        attempt=str(attempt),
        kind=request.kind,
        world_size=world_size,
        created_at=time.time(),
        files=tuple(sorted_receipts(contents.receipts)),
        directories=tuple(contents.directories),
        metrics=dict(sorted(request.metrics.items())),  # as readers get them: trackers may take the first alone
        metadata=request.metadata,
        extra=extra,
    )


def change_of(job: Job, newest: Record | None, entry: CheckpointEntry, references: Collection[str]) -> Commit:
    """Build the change of the commit: retention decides in the same step that makes the checkpoint visible."""
    newest = job.claim(newest)
    save_number = entry.save_number or job.next_save_number(newest.state)  # saves are ordered: this is the next
    entry = replace(entry, bases=_bases(job, newest, references), save_number=save_number)
    same_step = job.log.of_step(entry.step, newest.state.live)
    # A pinned checkpoint of the same step stays beside the new one: its pin was somebody's wish, the save is routine.
    replaces = {record.number for record in same_step} - set(newest.state.pinned)
    # With thousands of live checkpoints the verdicts would be most of the time of a save.
    dropped = [] if isinstance(job.policy, KeepAll) else _dropped(job, newest, entry, replaces)
    for verdict in dropped:
        logger.info("step %d goes to the trash: %s", verdict.step, verdict.reason)
    return Commit(
        entry=entry,
        replaces=tuple(sorted(replaces)),
        drops=tuple(verdict.number for verdict in dropped),
        reasons={verdict.number: verdict.reason for verdict in dropped},
    )


def _dropped(job: Job, newest: Record, entry: CheckpointEntry, replaces: Collection[int]) -> list[Verdict]:
    """Return the verdicts on the checkpoints that retention drops for the new one."""
    is_timed = job.policy.compares_times()
    earlier = job.candidates(newest, timed=is_timed)
    number = newest.number + 1
    manifest_key = entry.prefix + MANIFEST_NAME  # just written, so its time is now
    committed_at = job.storage.stat(manifest_key).modified_seconds if is_timed else math.nan
    candidate = Candidate(
        number=number,
        step=entry.step,
        committed_at=committed_at,
        metrics=entry.metrics,
        holds={number: entry.held_bytes, **held_by_bases(job.log, [entry])},
    )
    left = [item for item in earlier if item.number not in replaces]
    # What this commit replaces goes anyway, and must not take a place in "the best three".
    verdicts = decide(job.policy, [*left, candidate], protected=newest.state.protected(latest=number))
    return [verdict for verdict in verdicts if not verdict.keep]


def _bases(job: Job, newest: Record, references: Collection[str]) -> tuple[int, ...]:
    """Return the numbers of the live checkpoints of these attempts, to which another refers. Raises CheckpointGone."""
    if not references:
        return ()
    live = {record.entry.attempt: record.number for record in job.log.readable(newest.state.live)}
    gone = sorted(set(references) - live.keys())
    if gone:
        raise CheckpointGone(f"{gone[0]} is what the checkpoint refers to, and is not live any more")
    return tuple(sorted(live[attempt] for attempt in references))


def check_stored(
    storage: Storage,
    config: StoreConfig,
    attempt: Attempt,
    receipts: Sequence[Receipt],
    *,
    rank: int,
    also: Collection[str] = (),
) -> None:
    """Compare the stored files with the receipts, before anything refers to them. `rank` is that of this process.

    Files named in `also`, and parts that could not be deleted, may exist too. Raises StorageError for a file that is
    missing, has another size, or is in no receipt.
    """
    prefix = attempt.prefix
    stored = {file.key: file.size_bytes for file in storage.list(prefix)}
    for name in also:
        stored.pop(prefix + name, None)
    check_receipts(wait_for_files(storage, config, stored, prefix, receipts, rank=rank), prefix, receipts)
    known = {prefix + receipt.name for receipt in receipts if receipt.attempt is None}
    # Two jobs in one directory would otherwise commit a mixture; parts of uploads are garbage that nobody reads.
    others = [key for key in stored if key not in known and not PART_NAME.search(key)]
    if others:
        raise StorageError(
            f"{len(others)} files are in the directory of this attempt and in no receipt, for instance {min(others)}"
        )


def wait_for_files(
    storage: Storage,
    config: StoreConfig,
    stored: Mapping[str, int],
    prefix: str,
    receipts: Sequence[Receipt],
    *,
    rank: int,
) -> Mapping[str, int]:
    """Return the sizes of the stored files, by key, after another look at those of other ranks that a listing lacks or
    shows too short.

    On a disk each is looked at by name, with signs of life, until it has its size or `rank_timeout_seconds` are over:
    NFS and Lustre show a file that another node has written seconds later. On other storages it is looked at once.
    """
    seen = dict(stored)
    until = time.monotonic() + (config.rank_timeout_seconds if isinstance(storage, Disk) else 0.0)
    is_logged = False
    for receipt in (receipt for receipt in receipts if receipt.attempt is None and receipt.rank != rank):
        key = prefix + receipt.name
        while seen.get(key, -1) < receipt.size_bytes:
            beat()
            storage.doubt(key)  # opens it, after which NFS asks the server
            with suppress(FileMissing):
                seen[key] = storage.stat(key).size_bytes
            if time.monotonic() >= until or seen.get(key, -1) >= receipt.size_bytes:
                break
            if not is_logged:
                logger.info("waiting for %s of rank %d, which this node does not see yet", key, receipt.rank)
            is_logged = True
            time.sleep(_LATE_SECONDS)
    return seen


def check_receipts(stored: Mapping[str, int], prefix: str, receipts: Sequence[Receipt]) -> None:
    """Compare the sizes of stored files, by key, with the receipts. Raises StorageError for a file that is missing or
    has another size."""
    for receipt in (receipt for receipt in receipts if receipt.attempt is None):
        size_bytes = stored.get(prefix + receipt.name)
        if size_bytes != receipt.size_bytes:
            found = "is not there" if size_bytes is None else f"has {size_bytes} bytes"
            raise StorageError(
                f"{receipt.name} {found}, its rank stored {receipt.size_bytes} bytes",
                rank=receipt.rank,
                file=receipt.name,
                hint="Check that all ranks see the same storage and that nothing else writes to it",
            )


def write_manifest(
    storage: Storage, config: StoreConfig, attempt: Attempt, contents: Contents, data: bytes, *, counts: bool = True
) -> None:
    """Persist everything that must be durable with the manifest, then write the manifest.

    It may still arrive after an error. With `counts` False the attempt counts only once a record refers to it: a disk
    does both at once then, so that they wait for one commit of its journal.
    """
    key = attempt.key(MANIFEST_NAME)
    # Names are entries of directories: without their fsync a durable file may have no name after a loss of power.
    late = [attempt.key(name) for name in (*contents.directories, *contents.pending)]
    for name in contents.directories:
        storage.make_directory(attempt.key(name))

    def persist() -> None:
        if late and config.transfer.durable:
            storage.persist(late)

    def write() -> None:
        if not created(storage, key, data):
            raise StorageError(f"{key} exists already with other contents", file=key)

    num_threads = 2 if isinstance(storage, Disk) and not counts else 1
    mapped(call, [persist, write], num_threads=num_threads, name="ckptstore-manifest")
    if not isinstance(storage, Disk):
        _check_written(storage, key, len(data))


def _check_written(storage: Storage, key: str, size_bytes: int) -> None:
    """Raise StorageError unless the file that was just written exists with its size."""
    # A proxy that confirms before it has read the body may keep nothing. All other files of a checkpoint were listed.
    try:
        found = looked_twice(storage, key, lambda: storage.stat(key)).size_bytes
    except FileMissing:
        found = None
    if found != size_bytes:
        what = "is not there" if found is None else f"has {found} bytes"
        raise StorageError(
            f"{key} {what}, though {storage.uri} has said that its {size_bytes} bytes are stored",
            file=key,
            hint="Look for a proxy or a gateway that answers before it has stored what it gets",
        )
