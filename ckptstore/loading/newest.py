"""Resuming: claim the store for this job, then find the newest checkpoint that can be used, the same on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

from ckptstore.errors import CheckpointDamaged, CheckpointGone, InvalidName, NoUsableCheckpoint, StorageError
from ckptstore.events import CheckpointResumed, CheckpointSkipped, emit
from ckptstore.fast.candidates import FastCandidate
from ckptstore.format.record import Record
from ckptstore.job import Job
from ckptstore.loading import fast_newest
from ckptstore.loading.load_watch import watched
from ckptstore.loading.story import CheckpointFiles, files_of
from ckptstore.runtime.beat import Beat, beat

T = TypeVar("T")

Order = Callable[[Sequence[int]], Iterable[int]]
"""From the numbers of the live checkpoints, oldest first, to the order in which they are tried. The leader calls it."""


@runtime_checkable
class FastOrder(Protocol):
    """An `Order` that knows of fast checkpoints too."""

    def __call__(self, numbers: Sequence[int]) -> Iterable[int]:
        """See `Order`."""

    def of_fast(self, candidates: Sequence[FastCandidate]) -> Sequence[FastCandidate]:
        """From what the nodes and the store have, newest first, to the order in which they are tried."""


def newest_first(numbers: Sequence[int]) -> Iterable[int]:
    """The order of a job that goes on where the last one ended."""
    return reversed(numbers)


def resume(job: Job, *, order: Order = newest_first) -> CheckpointFiles | None:
    """Claim, and return the newest whole checkpoint; None in an empty store. Collective."""
    if job.fast_tier is not None and order is newest_first:
        return _resume_fast(job)

    with watched(job.group.rank, job.storage.uri) as load:

        def find() -> Any:
            newest = job.claim(job.log.newest() if job.epoch is not None else None, beat)
            record = first_whole(job, order(list(newest.state.live)), beat)
            found = None if record is None else [record.number, record.encode()]
            return {**job.claimed(), "record": found, **load.told()}

        with job.group.meeting("resume") as meeting:
            told = meeting.tell(find)
        load.hear(told)
        job.join_claim(told)
        if told["record"] is None:
            return None
        number, encoded = told["record"]
        record = Record.decode(encoded, number)
        load.found(record.entry.step, record)
    files = files_of(job, record)
    told_resumed(job, files)
    return files


def _resume_fast(job: Job) -> CheckpointFiles | None:
    """The same, where nodes may have newer ones."""
    with watched(job.group.rank, job.storage.uri) as load:
        seen = fast_newest.look(job, is_loaded=False)

        def choose() -> int | None:
            def check(files: CheckpointFiles) -> None:
                files.check_complete(files.read_manifest()[0])

            found = first_usable(seen.candidates, check, beat, [])
            return None if found is None else seen.candidates.index(found[0])

        with job.group.meeting("choose") as meeting:
            chosen = meeting.tell(choose)
        files = None if chosen is None else seen.candidates[chosen]
        if files is not None:
            load.found(files.step, files.record)
        fast_newest.resumed(job, seen, files)
    if files is not None:
        told_resumed(job, files)
    return files


def told_resumed(job: Job, files: CheckpointFiles) -> None:
    """Tell listeners from where this job goes on."""
    assert job.epoch is not None  # a job that resumes has claimed
    record = files.record
    emit(
        CheckpointResumed(
            step=files.step,
            number=files.number,
            rank=job.group.rank,
            epoch=job.epoch,
            store=job.storage.uri,
            created_at=record.entry.created_at if record else files.read_manifest()[0].created_at,
        )
    )


def first_whole(job: Job, numbers: Iterable[int], beat: Beat) -> Record | None:
    """The first checkpoint whose manifest is the committed one and whose files all have their sizes.

    Raises NoUsableCheckpoint as `first_usable` does.
    """

    def check(files: CheckpointFiles) -> None:
        with files.held():
            files.check_complete(files.read_manifest()[0])

    found = first_usable((files_of(job, job.log.records([number])[0]) for number in numbers), check, beat, [])
    return found[0].record if found else None


def first_usable(
    candidates: Iterable[CheckpointFiles], use: Callable[[CheckpointFiles], T], beat: Beat, reasons: list[str]
) -> tuple[CheckpointFiles, T] | None:
    """The first checkpoint that `use` does not find damaged, with what it returned; None where there are none. What is
    passed over is added to `reasons`.

    Raises NoUsableCheckpoint, which says what is wrong with each, when there are some and none can be used.
    """
    before = len(reasons)
    for files in candidates:
        try:
            return files, use(files)
        except (CheckpointDamaged, CheckpointGone, InvalidName, StorageError) as error:
            if isinstance(error, StorageError) and not _is_of_broken_disk(files, error):
                raise
            emit(CheckpointSkipped(step=files.step, number=files.number, reason=str(error)))
            reasons.append(f"step {files.step}: {error}")
            beat()
    if len(reasons) > before:
        raise NoUsableCheckpoint(f"None of {len(reasons)} checkpoints can be used: {'; '.join(reasons)}")
    return None


def _is_of_broken_disk(files: CheckpointFiles, error: StorageError) -> bool:
    """Whether a disk of a node cannot read a file, which is as good as damage. A place that does not answer now, lets
    nobody in or is full is no reason to go on from something older."""
    return files.certificate is not None and type(error) is StorageError
