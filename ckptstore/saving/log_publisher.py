"""Publish checkpoints through the log of a store: the job claims the store, and a record makes them visible."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ckptstore import extended
from ckptstore.errors import CkptstoreError, StepExists, StorageFull
from ckptstore.events import PruneFailed, emit
from ckptstore.format.layout import Attempt
from ckptstore.format.record import Record
from ckptstore.group import Group
from ckptstore.job import Job
from ckptstore.loading.checkpoint_files import CheckpointFiles, files_of
from ckptstore.retention import check_required
from ckptstore.saving.commit import commit, tell
from ckptstore.saving.phases import SaveClock
from ckptstore.saving.request import Request
from ckptstore.saving.shard import Contents, Decision, Shard
from ckptstore.saving.transaction import Destination, Ended, Transaction
from ckptstore.storage.base import Disk
from ckptstore.upkeep.disk_room import warn_of_full_disk
from ckptstore.upkeep.prune import empty_trash, prune
from ckptstore.upkeep.retain import verdicts_on


@dataclass(frozen=True, slots=True)
class LogPublisher:
    """See `Publisher`; this one appends records."""

    job: Job

    @property
    def destination(self) -> Destination:
        job = self.job
        return Destination(job.storage, job.storage.uri, job.group.rank, removes=job.is_leader)

    def claim(self, request: Request) -> Record:
        """Leader: claim the store for this job, and return its newest record.

        Raises InvalidMetric if a metric that retention needs is missing; StoreFenced.
        """
        job = self.job
        check_required(job.policy, request.metrics, missing=job.missing)
        return job.claim_to_save(request.step)

    def begin(self, request: Request, decision: Decision) -> Mapping[str, Any]:
        """See `Publisher.begin`. Raises StepExists; StorageFull; StoreMissing if the store has lost checkpoints or its
        log; and the errors of `claim`."""
        may_exist = request.options["exists"] != "error"
        if not may_exist and self.job.epoch is None:  # what is refused does not take the store over from another job
            self._refuse_existing(self.job.log.newest(), request.step)
        newest = self.claim(request)
        if isinstance(self.job.storage, Disk):  # elsewhere it is a request, and a commit looks
            self.job.check_latest_there(newest)
        if not may_exist:
            self._refuse_existing(newest, request.step)
        self._check_room(decision)
        return {**self.job.claimed(), "attempt": str(self.job.new_attempt(request.step))}

    def join(self, request: Request, begun: Mapping[str, Any]) -> Attempt:
        self.job.join_claim(begun)
        return Attempt.of(begun["attempt"])

    def publish(self, request: Request, attempt: Attempt, contents: Contents) -> Any:
        return commit(self.job, request, attempt, contents).to_wire()

    def outcome(self, lane: Group, attempt: Attempt, published: Any, end: Callable[[], Ended]) -> Record | None:
        record = self.job.log.commit_of(attempt) if published is None else self.job.log.from_wire(published)
        if record is None:
            return None
        job, ended = self.job, end()
        tell(record, job.storage, rank=job.group.rank, seconds=ended.seconds, slowest=ended.slowest)
        if job.is_leader:
            prune_behind(job)
        return record

    def _refuse_existing(self, newest: Record | None, step: int) -> None:
        if newest is not None and self.job.log.of_step(step, newest.state.live):
            raise StepExists(f"Step {step} is committed already", step=step, hint='Use exists="replace" to replace it')

    def _check_room(self, decision: Decision) -> None:
        storage, needed_bytes = self.job.storage, decision.size_bytes or 0
        free_bytes = storage.free_bytes()
        if free_bytes is not None and needed_bytes > free_bytes:
            empty_trash(self.job.log, storage, epoch=self.job.epoch)
            free_bytes = storage.free_bytes()
        if free_bytes is not None and needed_bytes > free_bytes and not decision.may_be_less:
            raise StorageFull(
                f"The checkpoint needs {needed_bytes} bytes, and {free_bytes} bytes are free at {storage.uri}",
                hint="Make room, or keep fewer checkpoints",
            )


def begin_in_store(
    job: Job, shard: Shard, request: Request, *, clock: SaveClock
) -> tuple[Transaction[Record], Callable[[], CheckpointFiles]]:
    """Let the ranks agree on a save to the store. Return the transaction, and a function that finishes it on any
    thread. Both calls are collective."""
    transaction = Transaction.begin(job.group, LogPublisher(job), shard, request, clock=clock)

    def finish() -> CheckpointFiles:
        with making_room(job):
            return files_of(job, transaction.finish(shard))

    return transaction, finish


@contextmanager
def making_room(job: Job) -> Iterator[None]:
    """Empty the trash if the context raises StorageFull.

    A quota of a user, or of a directory, often does not show before: the disk says that it has room. Only a commit
    prunes, so without this no later save would succeed either.
    """
    try:
        yield
    except StorageFull:
        if job.is_leader:
            try:
                empty_trash(job.log, job.storage, epoch=job.epoch)
            except CkptstoreError as error:
                emit(PruneFailed(error=str(error)))
        raise


def prune_behind(job: Job) -> None:
    """Start a prune in the background, thin what retention says, and warn if the disk will soon be full all the same.
    The leader calls this after each commit."""

    def run() -> None:
        try:
            prune(job.log, job.storage, job.config, epoch=job.epoch, behind_save=True)
        finally:
            if job.policy.thins():
                verdicts = verdicts_on(job.log, job.log.newest(), job.policy, unthinned=job.unthinned)
                for step, error in extended.thin_as_decided(job, {it.number: it.drops for it in verdicts}).items():
                    emit(PruneFailed(error=f"step {step} was not thinned: {error}"))
            job.saves_left = warn_of_full_disk(job.log, job.storage, warned=job.saves_left)

    job.prune_in_background(run)
