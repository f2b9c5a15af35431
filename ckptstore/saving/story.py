"""The save story, top to bottom: agree on what moves where, move the bytes, commit in one atomic step."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptstore.errors import CkptstoreError, InvalidInput, InvalidStep, StepExists, StorageFull
from ckptstore.events import CheckpointCommitted, SaveFailed, emit
from ckptstore.format.layout import Attempt, known_step
from ckptstore.format.record import Record
from ckptstore.group import Beat, Group
from ckptstore.job import Job
from ckptstore.retention import check_required
from ckptstore.saving.commit import commit, committed_record
from ckptstore.saving.request import Request
from ckptstore.saving.shard import Shard
from ckptstore.storage.base import HasLocalFiles, Persists, Storage
from ckptstore.upkeep.prune import empty_trash, prune

logger = logging.getLogger("ckptstore")


@dataclass(frozen=True, slots=True)
class Agreed:
    """A save on which all ranks have agreed, before any byte has moved."""

    request: Request
    attempt: Attempt
    told: bytes
    """What the shard needs to know."""
    lane: Group
    """Where the ranks meet for this attempt and no other: who missed the agreement cannot be mistaken there."""
    started: float


def save(job: Job, shard: Shard) -> Record:
    """Save the shards of all ranks as one checkpoint. Collective; returns the record of the commit.

    Any error on any rank before the commit is raised on all ranks, and the leader removes what was written.
    """
    return finish_save(job, shard, agree_on_save(job, shard))


def finish_save(job: Job, shard: Shard, agreed: Agreed) -> Record:
    """All of a save after the agreement. Collective, on any thread."""
    request, rank = agreed.request, agreed.lane.rank
    try:
        record, slowest = _store_and_commit(job, shard, agreed)
    except CkptstoreError as error:
        error.at(step=request.step)
        emit(SaveFailed(step=request.step, rank=rank, error=str(error)))
        if job.is_leader and error.committed is False:  # its own verdict; what others still write is garbage
            remove_files(job.storage, agreed.attempt)
        raise
    finally:
        agreed.lane.close()
    emit(
        CheckpointCommitted(
            step=request.step,
            number=record.number,
            rank=rank,
            size_bytes=record.entry.size_bytes,
            seconds=time.monotonic() - agreed.started,
            world_size=record.entry.world_size,
            slowest_rank=slowest[0] if slowest else None,
            slowest_by_seconds=slowest[1] if slowest else 0.0,
        )
    )
    if job.is_leader:
        job.prune_in_background(lambda: prune(job.log, job.storage, job.config, epoch=job.epoch))
    return record


def agree_on_save(job: Job, shard: Shard) -> Agreed:
    """One exchange before any byte moves: who has what, who owns the store, is there room. Collective."""
    started = time.monotonic()
    asked: list[Request] = []

    def describe(_beat: Beat) -> bytes:
        request, description = shard.describe()
        asked.append(request)
        return _packed({"step": request.step, "options": dict(request.options)}, description)

    def agree(parts: list[bytes], beat: Beat) -> bytes:
        heads, descriptions = zip(*(_unpacked(part) for part in parts), strict=True)
        check_same_request(heads)
        agreed = shard.agree(descriptions)
        check_required(job.policy, asked[0].metrics, missing=job.missing)
        newest = job.claim(job.log.newest() if job.epoch is not None else None)
        if asked[0].options["exists"] == "error":
            _refuse_existing(job, newest, asked[0].step)
        _check_room(job, agreed.size_bytes, beat)
        return _packed({**job.claimed(), "attempt": str(job.new_attempt(asked[0].step))}, agreed.told)

    head, told = _unpacked(job.group.exchange("save", describe, agree, step=known_step(shard.step)))
    job.join_claim(head)
    attempt = Attempt.parse(head["attempt"])
    assert attempt is not None  # the leader has just made it up
    return Agreed(asked[0], attempt, told, job.group.lane(str(attempt)), started)


def check_same_request(heads: Sequence[Mapping[str, object]]) -> None:
    """Raise InvalidStep or InvalidInput unless all ranks ask for the same; `heads` have "step" and "options"."""
    first = heads[0]
    for rank, head in enumerate(heads):
        if head["step"] != first["step"]:
            raise InvalidStep(f"rank {rank} saves step {head['step']}, rank 0 step {first['step']}", ranks=(0, rank))
        if head["options"] != first["options"]:
            raise InvalidInput(
                f"rank {rank} asks for {head['options']}, rank 0 for {first['options']}", ranks=(0, rank)
            )


def _refuse_existing(job: Job, newest: Record, step: int) -> None:
    if any(candidate.step == step for candidate in job.candidates(newest)):
        raise StepExists(f"Step {step} is committed already", step=step, hint='Use exists="replace" to replace it')


def _check_room(job: Job, needed_bytes: int, beat: Beat) -> None:
    if not isinstance(job.storage, Persists):
        return
    if needed_bytes > job.storage.free_bytes():
        empty_trash(job.log, job.storage, epoch=job.epoch, beat=beat)
    free_bytes = job.storage.free_bytes()
    if needed_bytes > free_bytes:
        raise StorageFull(
            f"The checkpoint needs {needed_bytes} bytes, and {free_bytes} bytes are free at {job.storage.uri}",
            hint="Make room, or keep fewer checkpoints",
        )


def _store_and_commit(job: Job, shard: Shard, agreed: Agreed) -> tuple[Record, Sequence[Any]]:
    """The second exchange: every rank stores its files; when all have, the leader commits. A rank that does not hear
    what became of it looks into the log, once. The slowest rank, and by how much, comes along where that is known."""
    attempt = agreed.attempt

    def store(beat: Beat) -> bytes:
        started = time.monotonic()
        stored = shard.store(attempt, agreed.told, beat)
        return _packed({"seconds": time.monotonic() - started}, stored)

    def publish(answers: list[bytes], beat: Beat) -> bytes:
        heads, stored = zip(*map(_unpacked, answers), strict=True)
        record = commit(job, agreed.request, attempt, shard.join(attempt, stored, beat), beat)
        slowest = _slowest([head["seconds"] for head in heads])
        return _packed({"number": record.number, "slowest": slowest}, record.encode())

    try:
        answer = agreed.lane.exchange("receipts", store, publish)
    except CkptstoreError as error:
        record = committed_record(job.log, attempt) if error.committed is None else None
        if record is None:
            raise
        logger.warning("step %d is committed, though this rank did not hear of it: %s", agreed.request.step, error)
        return record, ()
    head, data = _unpacked(answer)
    return Record.decode(data, head["number"]), head["slowest"]


def _slowest(seconds: Sequence[float]) -> list[Any]:
    """The rank that took longest, and how much longer than the one in the middle; nothing for one rank."""
    if len(seconds) == 1:
        return []
    rank = max(range(len(seconds)), key=lambda number: seconds[number])
    return [rank, seconds[rank] - sorted(seconds)[(len(seconds) - 1) // 2]]


def remove_files(storage: Storage, attempt: Attempt) -> None:
    """Leader, after its verdict "not committed": nothing will ever refer to the attempt. Best effort."""
    try:
        storage.delete([file.key for file in storage.list(attempt.prefix)])
        if isinstance(storage, HasLocalFiles):
            storage.remove_directories(attempt.prefix.rstrip("/"))
    except CkptstoreError as error:
        logger.warning("what step %d left could not be removed: %s", attempt.step, error)


def _packed(head: object, body: bytes) -> bytes:
    return json.dumps(head).encode() + b"\n" + body


def _unpacked(data: bytes) -> tuple[dict[str, Any], bytes]:
    head, _, body = data.partition(b"\n")
    return json.loads(head), body
