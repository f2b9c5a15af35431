"""A place in a store for users who call `dcp.save` themselves: attempt, manifest and commit around torch's own save.

    dcp.save(state_dict, storage_writer=StoreWriter(store.dcp_target(metrics={"loss": 0.3}), step=100))

The coordinator alone claims, begins and commits. The other ranks write their files under the prefix that it sends.
Nobody deletes the files of a save that failed: torch does not let a rank know when the others have ended, so they are
garbage.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ckptstore.config import StoreConfig
from ckptstore.errors import InvalidStep
from ckptstore.format.layout import Attempt, check_step
from ckptstore.format.manifest import Receipt
from ckptstore.format.timings import Timings
from ckptstore.group import SoloGroup
from ckptstore.job import Job
from ckptstore.log import Log
from ckptstore.retention import Policy
from ckptstore.saving.commit import tell
from ckptstore.saving.log_publisher import LogPublisher, prune_behind
from ckptstore.saving.request import Request
from ckptstore.saving.shard import Contents
from ckptstore.storage.base import Storage
from ckptstore.transfer import Transfer


@dataclass(kw_only=True)
class StoreTarget:
    """A place in the store; see `ckptstore.dcp.target.DcpTarget`. Pickled without its job, with the job's writer
    epoch."""

    storage: Storage
    config: StoreConfig
    policy: Policy
    missing: str
    metrics: Mapping[str, Any] | None
    metadata: Mapping[str, Any] | None
    epoch: int | None
    resume_from: int | None
    job: Job | None
    in_turn: Callable[[], object] | None
    """The function that waits for saves that the store has in flight. Raises InvalidInput when the store is closed."""
    _transfer: Transfer | None = None
    _request: Request | None = None
    _attempt: Attempt | None = None
    _begun_at: int = 0
    """The number of the newest record when the attempt began."""
    _started: float = 0.0

    @staticmethod
    def of(
        job: Job,
        *,
        in_turn: Callable[[], object],
        metrics: Mapping[str, Any] | None,
        metadata: Mapping[str, Any] | None,
    ) -> StoreTarget:
        """Return a place in the store of this job."""
        return StoreTarget(
            storage=job.storage,
            config=job.config,
            policy=job.policy,
            missing=job.missing,
            metrics=metrics,
            metadata=metadata,
            epoch=job.epoch,
            resume_from=job.resume_from,
            job=job,
            in_turn=in_turn,
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "job": None, "in_turn": None, "_transfer": None}

    @property
    def uri(self) -> str:
        """The URI of the store, without secrets."""
        return self.storage.uri

    def open(self) -> tuple[Storage, Transfer]:
        """Return the storage and its transfer."""
        if self.job is not None:
            self.job.check_open()
            return self.storage, self.job.transfer
        if self._transfer is None:
            self._transfer = Transfer(self.storage, config=self.config.transfer, retry=self.config.retry)
        return self.storage, self._transfer

    def begin(self, step: int | None) -> str:
        """Coordinator: claim the store unless this job has, and name the attempt.

        Raises InvalidStep without a step, InvalidMetric when one that retention needs is missing, StoreFenced.
        """
        self._started = time.monotonic()
        if step is None:
            raise InvalidStep("A checkpoint in a store needs a step: StoreWriter(store.dcp_target(), step=...)")
        request = Request.of(
            step=check_step(step), kind="state", metrics=self.metrics, metadata=self.metadata, exists="replace"
        )
        if self.in_turn is not None:
            self.in_turn()
        job = self._alone(world_size=1)
        self._begun_at = LogPublisher(job).claim(request).number
        self.epoch, self.resume_from = job.epoch, job.resume_from
        if self.job is not None:
            self.job.join_claim(job.claimed())
        self._request, self._attempt = request, job.new_attempt(request.step)
        return self._attempt.prefix

    def finish(
        self, prefix: str, receipts: Sequence[Receipt], *, world_size: int, timings: Callable[[], Timings] | None = None
    ) -> None:
        """Coordinator: commit the files that all ranks stored; then prune.

        Raises InvalidInput when another checkpoint was committed since `begin`.
        """
        assert self._request is not None  # `begin` came first
        assert self._attempt is not None
        job = self._alone(world_size=world_size)
        publisher = LogPublisher(job, after=self._begun_at)
        record = publisher.commit(self._request, self._attempt, Contents(receipts, timings=timings))
        tell(record, job.storage, rank=0, seconds=time.monotonic() - self._started)
        if self.job is not None:
            prune_behind(self.job)

    def close(self) -> None:
        """Close the transfer that `open` made."""
        transfer, self._transfer = self._transfer, None
        if transfer is not None:
            transfer.close()

    def _alone(self, *, world_size: int) -> Job:
        """Return the coordinator as a separate job that agrees with nobody, since torch does that."""
        group = SoloGroup()
        group.world_size = world_size
        storage, transfer = self.open()
        owner = self.job
        log = owner.log if owner else Log(storage, retry=self.config.retry, single_writer=self.config.single_writer)
        epoch, resume_from = (owner.epoch, owner.resume_from) if owner else (self.epoch, self.resume_from)
        alone = Job(
            storage=storage,
            log=log,
            transfer=transfer,
            config=self.config,
            policy=self.policy,
            missing=self.missing,
            given_group=group,
        )
        return replace(alone, epoch=epoch, resume_from=resume_from)
