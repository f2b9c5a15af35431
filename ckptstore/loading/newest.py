"""Resuming: claim the store for this job, then find the newest checkpoint that can be used, the same on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from ckptstore.errors import CheckpointDamaged, CheckpointGone, InvalidName, NoUsableCheckpoint
from ckptstore.events import CheckpointResumed, CheckpointSkipped, emit
from ckptstore.format.record import Record
from ckptstore.group import Beat
from ckptstore.job import Job
from ckptstore.loading.load_watch import watched
from ckptstore.loading.story import files_of

T = TypeVar("T")

Order = Callable[[Sequence[int]], Iterable[int]]
"""From the numbers of the live checkpoints, oldest first, to the order in which they are tried. The leader calls it."""


def newest_first(numbers: Sequence[int]) -> Iterable[int]:
    """The order of a job that goes on where the last one ended."""
    return reversed(numbers)


def resume(job: Job, *, order: Order = newest_first) -> Record | None:
    """Claim, and return the record of the newest whole checkpoint; None in an empty store. Collective."""

    with watched(job.group.rank, job.storage.uri) as load:

        def join(_parts: list[Any], beat: Beat) -> Any:
            newest = job.claim(job.log.newest() if job.epoch is not None else None)
            record = first_whole(job, order(list(newest.state.live)), beat)
            found = None if record is None else [record.number, record.encode().decode()]
            return {**job.claimed(), "record": found, **load.told()}

        told = job.exchange("resume", lambda _beat: None, join)
        load.hear(told)
        job.join_claim(told)
        if told["record"] is None:
            return None
        number, text = told["record"]
        record = Record.decode(text.encode(), number)
        load.found(record.entry.step, record)
    told_resumed(job, record)
    return record


def told_resumed(job: Job, record: Record) -> None:
    """Tell listeners from where this job goes on."""
    assert job.epoch is not None  # a job that resumes has claimed
    emit(
        CheckpointResumed(
            step=record.entry.step,
            number=record.number,
            rank=job.group.rank,
            epoch=job.epoch,
            store=job.storage.uri,
            created_at=record.entry.created_at,
        )
    )


def first_whole(job: Job, numbers: Iterable[int], beat: Beat) -> Record | None:
    """The first checkpoint whose manifest is the committed one and whose files all have their sizes.

    Raises NoUsableCheckpoint as `first_usable` does.
    """

    def check(record: Record) -> None:
        files = files_of(job, record)
        with files.held():
            files.check_complete(files.read_manifest()[0])

    found = first_usable((job.log.records([number])[0] for number in numbers), check, beat)
    return found[0] if found else None


def first_usable(records: Iterable[Record], use: Callable[[Record], T], beat: Beat) -> tuple[Record, T] | None:
    """The first checkpoint that `use` does not find damaged, with what it returned; None where there are none.

    Raises NoUsableCheckpoint, which says what is wrong with each, when there are some and none can be used.
    """
    reasons = []
    for record in records:
        try:
            return record, use(record)
        except (CheckpointDamaged, CheckpointGone, InvalidName) as error:
            emit(CheckpointSkipped(step=record.entry.step, number=record.number, reason=str(error)))
            reasons.append(f"step {record.entry.step}: {error}")
            beat()
    if reasons:
        raise NoUsableCheckpoint(f"None of {len(reasons)} checkpoints can be used: {'; '.join(reasons)}")
    return None
