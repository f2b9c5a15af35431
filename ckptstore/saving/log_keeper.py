"""The keeper whose checkpoints a log has: the job claims the store, and a record makes a checkpoint visible."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptstore.errors import StepExists, StorageFull
from ckptstore.format.layout import Attempt
from ckptstore.format.record import Record
from ckptstore.group import Group
from ckptstore.job import Job
from ckptstore.retention import check_required
from ckptstore.runtime.beat import Beat, no_beat
from ckptstore.saving.commit import commit, tell
from ckptstore.saving.request import Request
from ckptstore.saving.shard import Contents, Decision
from ckptstore.saving.story import remove_files
from ckptstore.storage.base import Disk, Storage
from ckptstore.upkeep.prune import empty_trash, prune


@dataclass(frozen=True, slots=True)
class LogKeeper:
    """See `ckptstore.saving.story.Keeper`; it keeps records."""

    job: Job

    @property
    def storage(self) -> Storage:
        """Where the store is."""
        return self.job.storage

    @property
    def store_uri(self) -> str:
        """See `Keeper.store_uri`."""
        return self.storage.uri

    @property
    def is_fast(self) -> bool:
        """See `Keeper.is_fast`."""
        return False

    @property
    def rank(self) -> int:
        """This process in its job."""
        return self.job.group.rank

    def claim(self, request: Request, beat: Beat = no_beat) -> Record:
        """Leader: the newest record of the store, which this job owns from here on.

        Raises InvalidMetric when a metric that retention needs is missing, StoreFenced.
        """
        job = self.job
        check_required(job.policy, request.metrics, missing=job.missing)
        return job.claim_to_save(request.step, beat)

    def begin(self, request: Request, decision: Decision, beat: Beat) -> Mapping[str, Any]:
        """See `Keeper.begin`. Raises StepExists, StorageFull, StoreMissing where the store has
        lost checkpoints or its log, and what `claim` raises."""
        newest = self.claim(request, beat)
        if isinstance(self.storage, Disk):  # elsewhere it is a request, and a commit looks
            self.job.check_latest_there(newest)
        if request.options["exists"] == "error":
            self._refuse_existing(newest, request.step)
        self._check_room(decision, beat)
        return {**self.job.claimed(), "attempt": str(self.job.new_attempt(request.step))}

    def attempt(self, request: Request, begun: Mapping[str, Any]) -> Attempt:
        """See `Keeper.attempt`."""
        self.job.join_claim(begun)
        attempt = Attempt.parse(begun["attempt"])
        assert attempt is not None  # the leader has just made it up
        return attempt

    def lane(self, attempt: Attempt) -> str:
        """See `Keeper.lane`."""
        return str(attempt)

    def publish(self, request: Request, attempt: Attempt, contents: Contents, beat: Beat) -> Any:
        """See `Keeper.publish`."""
        record = commit(self.job, request, attempt, contents, beat)
        return record.number, record.encode()

    def outcome(self, lane: Group, attempt: Attempt, published: Any) -> Record:
        """See `Keeper.outcome`."""
        number, data = published
        return Record.decode(data, number)

    def find(self, attempt: Attempt) -> Record | None:
        """See `Keeper.find`."""
        return self.job.log.commit_of(attempt)

    def discard(self, attempt: Attempt) -> None:
        """See `Keeper.discard`: the leader removes the files of all ranks."""
        if self.job.is_leader:
            remove_files(self.storage, attempt)

    def committed(self, kept: Record, *, seconds: float, slowest: Sequence[Any]) -> None:
        """See `Keeper.committed`. The leader deletes in the background what has been in the trash for long enough."""
        job = self.job
        tell(kept, self.storage, rank=self.rank, seconds=seconds, slowest=slowest)
        if job.is_leader:
            job.prune_in_background(lambda: prune(job.log, job.storage, job.config, epoch=job.epoch))

    def _refuse_existing(self, newest: Record, step: int) -> None:
        if any(candidate.step == step for candidate in self.job.candidates(newest)):
            raise StepExists(f"Step {step} is committed already", step=step, hint='Use exists="replace" to replace it')

    def _check_room(self, decision: Decision, beat: Beat) -> None:
        storage, needed_bytes = self.storage, decision.size_bytes or 0
        if not isinstance(storage, Disk):
            return
        if needed_bytes > storage.free_bytes():
            empty_trash(self.job.log, storage, epoch=self.job.epoch, beat=beat)
        free_bytes = storage.free_bytes()
        if needed_bytes > free_bytes and not decision.may_be_less:
            raise StorageFull(
                f"The checkpoint needs {needed_bytes} bytes, and {free_bytes} bytes are free at {storage.uri}",
                hint="Make room, or keep fewer checkpoints",
            )
