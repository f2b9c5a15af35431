"""The save story, top to bottom: agree on names, move the bytes, commit in one atomic step."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

from ckptstore.commit import commit
from ckptstore.directories import Directory, scan, sha256_of_files
from ckptstore.errors import CkptstoreError, RankTimeout, StepExists, StorageError, StorageFull
from ckptstore.events import CheckpointCommitted, SaveFailed, SaveStarted, emit
from ckptstore.group import Beat
from ckptstore.job import Job
from ckptstore.layout import Attempt
from ckptstore.manifest import Receipt
from ckptstore.naming import Agreement, Offer, agree
from ckptstore.plan import PlannedFile
from ckptstore.prune import empty_trash, prune
from ckptstore.records import Record
from ckptstore.request import Request
from ckptstore.retention import check_required
from ckptstore.sources import FileSource
from ckptstore.storage.base import HasLocalFiles, Persists

logger = logging.getLogger("ckptstore")


def save_directory(
    job: Job,
    step: Any,
    directory: Any,
    *,
    suffix: str,
    shared: Collection[str],
    link: bool,
    **request_fields: Any,
) -> Record:
    """Save the files of every rank's directory as one checkpoint. Collective; returns the record of the commit."""
    found: list[Directory] = []

    def offer() -> tuple[Request, Offer]:
        names = sorted(shared)
        request = Request.of(step, "directory", suffix=suffix, shared=names, link=link, **request_fields)
        found.append(scan(directory))
        size_bytes = 0 if link else found[0].size_bytes
        digests = sha256_of_files(found[0], names)
        return request, Offer(request.step, request.options, list(found[0].files), found[0].empty, digests, size_bytes)

    def work(attempt: Attempt, agreement: Agreement, beat: Beat) -> list[Receipt]:
        named = {
            name: stored
            for name in found[0].files
            if (stored := agreement.stored_name(name, job.group.rank)) is not None
        }
        return store_files(job, attempt, found[0].files, named, link=link, beat=beat)

    return save(job, offer, work)


def save(
    job: Job,
    offer: Callable[[], tuple[Request, Offer]],
    work: Callable[[Attempt, Agreement, Beat], list[Receipt]],
) -> Record:
    """The story of every save.

    `offer` says what this rank has; it may raise. `work` stores this rank's files and returns their receipts. Any
    error on any rank before the commit is raised on all ranks, and what was written is removed.
    """
    started = time.monotonic()
    request, agreement, attempt = _agree(job, offer)
    try:
        record = _store_and_commit(job, request, agreement, attempt, work)
    except CkptstoreError as error:
        error.at(step=request.step)
        emit(SaveFailed(step=request.step, rank=job.group.rank, error=str(error)))
        if error.committed is False:
            _remove_own_files(job, attempt)
        raise
    seconds = time.monotonic() - started
    emit(
        CheckpointCommitted(
            step=request.step,
            number=record.number,
            rank=job.group.rank,
            size_bytes=record.entry.size_bytes,
            seconds=seconds,
        )
    )
    if job.is_leader:
        job.prune_in_background(lambda: prune(job.log, job.storage, job.config, epoch=job.epoch))
    return record


def _agree(job: Job, offer: Callable[[], tuple[Request, Offer]]) -> tuple[Request, Agreement, Attempt]:
    """One exchange before any byte moves: who brings which names, who owns the store, is there room."""
    mine: list[Request] = []

    def work(_beat: Beat) -> Any:
        request, offered = offer()
        mine.append(request)
        return offered.to_json()

    def join(parts: list[Any], _beat: Beat) -> Any:
        agreement = agree([Offer.from_json(part) for part in parts])
        request = mine[0]
        check_required(job.policy, request.metrics, missing=job.missing)
        newest = job.claim(job.log.newest() if job.epoch is not None else None)
        if request.options["exists"] == "error":
            _refuse_existing(job, newest, request.step)
        _check_room(job, agreement.size_bytes)
        return {**job.claimed(), "agreement": agreement.to_json()}

    told = job.exchange("names", work, join)
    job.join_claim(told)
    assert job.epoch is not None  # the leader has just claimed
    attempt = job.next_attempt(mine[0].step, job.epoch)
    return mine[0], Agreement.from_json(told["agreement"]), attempt


def _refuse_existing(job: Job, newest: Record, step: int) -> None:
    if any(candidate.step == step for candidate in job.candidates(newest)):
        raise StepExists(f"Step {step} is committed already", step=step, hint='Use exists="replace" to replace it')


def _check_room(job: Job, needed_bytes: int) -> None:
    if not isinstance(job.storage, Persists):
        return
    if needed_bytes > job.storage.free_bytes():
        empty_trash(job.log, job.storage, epoch=job.epoch)
    free_bytes = job.storage.free_bytes()
    if needed_bytes > free_bytes:
        raise StorageFull(
            f"The checkpoint needs {needed_bytes} bytes, and {free_bytes} bytes are free at {job.storage.uri}",
            hint="Make room, or keep fewer checkpoints",
        )


def _store_and_commit(
    job: Job,
    request: Request,
    agreement: Agreement,
    attempt: Attempt,
    work: Callable[[Attempt, Agreement, Beat], list[Receipt]],
) -> Record:
    """The second exchange: every rank stores its files; with all receipts the leader commits."""

    def store(beat: Beat) -> Any:
        return [receipt.to_json() for receipt in work(attempt, agreement, beat)]

    def publish(parts: list[Any], beat: Beat) -> Any:
        receipts = [Receipt.from_json(entry) for part in parts for entry in part]
        record = commit(job, request, agreement, attempt, receipts, beat)
        return [record.number, record.encode().decode()]

    try:
        number, text = job.exchange("receipts", store, publish)
    except RankTimeout as error:
        record = _committed_after_all(job, attempt) if 0 in error.ranks else None
        if record is None:
            error.committed = None if 0 in error.ranks else False
            raise
        return record
    return Record.decode(text.encode(), number)


def _committed_after_all(job: Job, attempt: Attempt) -> Record | None:
    """The leader is gone: the log says whether it committed first."""
    try:
        newest = job.log.newest()
        found = job.log.records(newest.state.live if newest else ())
    except StorageError:
        return None
    return next((record for record in found if record.entry.attempt == str(attempt)), None)


def store_files(
    job: Job,
    attempt: Attempt,
    sources: Mapping[str, FileSource],
    named: Mapping[str, str],
    *,
    link: bool,
    beat: Beat,
) -> list[Receipt]:
    """Store files under their agreed names (`named`: own name -> stored name) and return the receipts."""
    rank = job.group.rank
    left, receipts = dict(named), []
    if link and isinstance(job.storage, HasLocalFiles):
        for name, stored in named.items():
            if job.storage.link(sources[name].path, attempt.key(stored)):
                size_bytes = sources[name].size_bytes
                receipts.append(Receipt(stored, size_bytes, None, rank, name if name != stored else None))
                del left[name]
        if isinstance(job.storage, Persists) and job.config.transfer.durable:
            job.storage.persist([attempt.key(receipt.name) for receipt in receipts])
    files = [PlannedFile(attempt.key(stored), sources[name]) for name, stored in left.items()]
    size_bytes = sum(file.source.size_bytes for file in files)
    emit(SaveStarted(step=attempt.step, attempt=str(attempt), rank=rank, num_files=len(files), size_bytes=size_bytes))
    for (name, stored), done in zip(left.items(), job.transfer.upload(files, beat=beat), strict=True):
        original = name if name != stored else None
        receipts.append(Receipt(stored, done.size_bytes, done.crc32c, rank, original, done.version))
    if isinstance(job.storage, Persists):
        job.storage.seal([file.key for file in files])
    return receipts


def _remove_own_files(job: Job, attempt: Attempt) -> None:
    """After a failure: nothing of the attempt is referred to, so everything of it may go. Best effort."""
    try:
        job.storage.delete([file.key for file in job.storage.list(attempt.prefix)])
        if isinstance(job.storage, HasLocalFiles):
            job.storage.remove_directories(attempt.prefix.rstrip("/"))
    except CkptstoreError as error:
        logger.warning("what step %d left could not be removed: %s", attempt.step, error)
