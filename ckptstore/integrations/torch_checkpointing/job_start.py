"""Agree among the ranks of one job without a meeting: on their identity, and on their writer epoch."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from ckptstore.errors import InvalidInput
from ckptstore.format.changes import Claim
from ckptstore.format.record import Record
from ckptstore.job import Job
from ckptstore.storage.base import CreatesExclusively


@dataclass(frozen=True, slots=True)
class JobStart:
    """One start of a job, as one of its ranks knows it."""

    token: str
    """Equal on all ranks, new for every start."""
    since: int
    """The number of a record that was in the log before any rank wrote; 0 for an empty log."""
    rank: int = 0
    world_size: int = 1


class Epoch:
    """The writer epoch of a job: claimed by the rank that writes first, found in the log by the others."""

    def __init__(self, job: Job, start: JobStart) -> None:
        self._job = job
        self._start = start
        self._lock = threading.Lock()

    def claimed(self) -> int:
        """Return the epoch, claimed. Raises StoreFenced when a later job has claimed the store."""
        with self._lock:
            if self._job.epoch is None:
                self._job.epoch = self._claim_or_join()
            self._job.claim(self._job.log.newest())
            return self._job.epoch

    def _claim_or_join(self) -> int:
        job, start = self._job, self._start
        if not isinstance(job.storage, CreatesExclusively):
            raise InvalidInput(
                f"{job.storage.uri} cannot create a file only where there is none, so ranks could claim it twice"
            )
        job.log.try_creates()
        job.store_id()
        found: list[int] = []

        def decide(newest: Record | None) -> Claim | None:
            found[:] = self._own_claims(newest)
            return None if found else Claim(start_token=start.token, world_size=start.world_size)

        record = job.log.append(decide)
        return found[0] if record is None else record.state.epoch

    def _own_claims(self, newest: Record | None) -> list[int]:
        """Return the epoch that another rank of this job has claimed."""
        # Else a rank that writes first after a later job's claim would take the store back from that job.
        numbers = range(self._start.since + 1, (newest.number if newest else 0) + 1)
        records = self._job.log.records(numbers)
        return [
            item.state.epoch
            for item in records
            if isinstance(item.change, Claim) and item.change.start_token == self._start.token
        ]
