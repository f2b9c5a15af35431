"""Resume: claim the store for this job, then find the newest usable checkpoint, the same on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from ckptstore.errors import (
    CheckpointDamaged,
    CheckpointGone,
    CheckpointThinned,
    InvalidInput,
    InvalidName,
    NoUsableCheckpoint,
    StorageError,
    StoreMissing,
)
from ckptstore.events import CheckpointResumed, CheckpointSkipped, emit
from ckptstore.format.order import SaveOrder
from ckptstore.job import Job, Tier
from ckptstore.loading.checkpoint_files import CheckpointFiles, files_of
from ckptstore.loading.load_watch import watched
from ckptstore.loading.neighbours import full_neighbour
from ckptstore.runtime.beat import beat

T = TypeVar("T")

Order = Callable[[Sequence[int]], Iterable[int]]
"""A function from the numbers of the live checkpoints, oldest first, to the order in which to try them. The leader
calls it."""

_DEFAULTS = {"strict": True, "dtype": "same", "read_once": "rank", "per_rank": "error", "allow_pickle": False}
"""The defaults of those keywords of a load for which it is not None."""


class Candidates(NamedTuple):
    """The checkpoints from which a job with a fast tier can resume."""

    files: Sequence[CheckpointFiles]
    """The checkpoints, in the order to try them."""
    passed_over: Sequence[str]
    """The newer checkpoints that cannot be used, each with the reason."""
    resumed: Callable[[CheckpointFiles | None], None]
    """Records in the log the checkpoint from which the job resumes. Collective. An error of the log is raised on all
    ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Near:
    """A fast checkpoint that this process may read before it is in the store."""

    order: SaveOrder
    attempt: str
    is_durable: bool
    """True if the log has it as live."""
    is_superseded: bool
    """True if the log has a newer one."""
    files: CheckpointFiles


def newest_first(numbers: Sequence[int]) -> Iterable[int]:
    """Return the order of a usual resume: the newest checkpoint first."""
    return reversed(numbers)


def refuse_load_options(options: Mapping[str, Any]) -> None:
    """Raise InvalidInput if a resume without a state has keywords of a load with other values than their defaults."""
    if changed := [name for name, value in options.items() if value != _DEFAULTS.get(name)]:
        raise InvalidInput(
            f"{', '.join(changed)}: a resume without a state loads nothing, and takes no keywords of a load",
            hint="Give the state, or leave them out",
        )


def resume(job: Job, *, order: Order = newest_first) -> CheckpointFiles | None:
    """Claim the store, and return the newest whole checkpoint; None in an empty store. Collective."""
    if job.tier is not None and order is newest_first:
        return _resume_first(job, job.tier)

    def check(files: CheckpointFiles) -> None:
        with files.held():
            _check_whole(files)

    with watched(job.group.rank, job.storage.uri) as load:

        def find() -> Any:
            newest = job.claim(job.log.newest() if job.epoch is not None else None)
            numbers = order(newest.state.in_order())
            found = first_usable((files_of(job, job.log.records([number])[0]) for number in numbers), check, [])
            record = None if found is None else found[0].record
            # A start that takes a full store for empty would train from the beginning: look once more, another way.
            if record is None:
                job.log.confirm()
            # The record travels with its metrics, so that the other ranks ask the storage for nothing.
            wire = None if record is None else job.log.annotated([record], newest)[0].to_wire()
            return {**job.claimed(), "record": wire, **load.told()}

        with job.group.meeting("resume") as meeting:
            told = meeting.tell(find)
        load.hear(told)
        job.join_claim(told)
        if told["record"] is None:
            return None
        record = job.log.from_wire(told["record"])
        load.found(record.entry.step, record)
    files = files_of(job, record)
    told_resumed(job, files)
    return files


def require_checkpoint(job: Job) -> None:
    """Raise StoreMissing on all ranks if there is nothing to resume from. Writes nothing to the store. Collective."""
    # A checkpoint may be on the disk of one node alone, so every rank says what it sees.
    near = 0 if job.tier is None else len(job.tier.near(job))

    def find(nears: Sequence[int]) -> None:
        newest = job.log.newest()
        if not any(nears) and not (newest and newest.state.live):
            neighbour = "" if job.open_at is None else full_neighbour(job.storage, job.open_at)
            raise StoreMissing(
                f"There is no checkpoint at {job.storage.uri} to resume from, and this start requires one",
                hint=f"{neighbour}. Was that meant?" if neighbour else "Look for a typo in the URI",
            )

    with job.group.meeting("require") as meeting:
        nears = meeting.gather(near)
        meeting.tell(lambda: find(nears))


def log_neighbour(job: Job) -> None:
    """Leader: log a line on a store with checkpoints beside the empty place of this job. Other ranks do nothing."""
    if job.is_leader and job.open_at is not None:
        full_neighbour(job.storage, job.open_at)


def _resume_first(job: Job, tier: Tier) -> CheckpointFiles | None:
    """Resume from the first candidate of the tier that is whole; None if there are none. Collective."""

    def choose() -> int | None:
        found = first_usable(offered.files, _check_whole, [])
        return None if found is None else offered.files.index(found[0])

    with watched(job.group.rank, job.storage.uri) as load:
        offered: Candidates = tier.candidates(job, newest_first, is_loaded=False)
        with job.group.meeting("choose") as meeting:
            chosen = meeting.tell(choose)
        files = None if chosen is None else offered.files[chosen]
        if files is not None:
            load.found(files.step, files.record)
        offered.resumed(files)
    if files is not None:
        told_resumed(job, files)
    return files


def told_resumed(job: Job, files: CheckpointFiles) -> None:
    """Emit the event of a resume from these files."""
    record = files.record
    emit(
        CheckpointResumed(
            step=files.step,
            number=files.number,
            rank=job.group.rank,
            epoch=job.claimed_epoch,
            store=job.storage.uri,
            created_at=record.entry.created_at if record else files.read_manifest()[0].created_at,
        )
    )


def _check_whole(files: CheckpointFiles) -> None:
    """Raise CheckpointThinned or CheckpointDamaged unless a job can resume from the checkpoint."""
    manifest = files.read_manifest()[0]
    if manifest.thinned is not None:
        raise CheckpointThinned(f"step {manifest.step} {manifest.thinned}", step=manifest.step)
    files.check_complete(manifest)


def first_usable(
    candidates: Iterable[CheckpointFiles], use: Callable[[CheckpointFiles], T], reasons: list[str]
) -> tuple[CheckpointFiles, T] | None:
    """Return the first checkpoint for which `use` raises no damage, with the result of `use`; None if there are none.
    One that lacks what thinning dropped is passed over too.

    Appends a line to `reasons` for each checkpoint that is passed over. Raises NoUsableCheckpoint, with all of them, if
    there are checkpoints and none can be used.
    """
    before = len(reasons)
    for files in candidates:
        try:
            return files, use(files)
        except (CheckpointDamaged, CheckpointGone, CheckpointThinned, InvalidName, StorageError) as error:
            # An older checkpoint is no answer to a network that is away: the job would lose steps that are stored.
            if isinstance(error, StorageError) and not files.is_broken_by(error):
                raise
            emit(CheckpointSkipped(step=files.step, number=files.number, reason=str(error)))
            reasons.append(f"step {files.step}: {error}")
            beat()
    if len(reasons) > before:
        raise NoUsableCheckpoint(f"None of {len(reasons)} checkpoints can be used: {'; '.join(reasons)}")
    return None
