"""Saves of a job with a fast tier: to the disks of the nodes first, and from there into the store."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from ckptstore.errors import InvalidInput, StorageFull, StorageUnavailable
from ckptstore.events import FastBypassed, emit
from ckptstore.extensions.tier.certificate import Certificate
from ckptstore.extensions.tier.drain import Drain, Drainer
from ckptstore.extensions.tier.fast_files import fast_files_of
from ckptstore.extensions.tier.nodes.fast_place import FastPlace
from ckptstore.extensions.tier.partner import doubled_upload
from ckptstore.extensions.tier.publisher import FastPublisher
from ckptstore.format.record import Record
from ckptstore.loading.checkpoint_files import files_of
from ckptstore.retention import Candidate
from ckptstore.saving.directory_shard import DirectoryShard
from ckptstore.saving.health import ResumedFrom, StoreHealth, health_of
from ckptstore.saving.log_publisher import LogPublisher, making_room
from ckptstore.saving.phases import SaveClock
from ckptstore.saving.request import Request
from ckptstore.saving.save_state import SaveResult, StateSaver, Target
from ckptstore.saving.shard import Shard
from ckptstore.saving.state_shard import StateOptions, StateShard
from ckptstore.saving.transaction import Transaction


@dataclass(kw_only=True)
class FastSaver(StateSaver):
    """See `StateSaver`."""

    open_place: Callable[[int | None], FastPlace]
    """Opens the fast tier, to save a step. The first call is collective."""
    _drainer: Drainer | None = None
    _last_due: Candidate | None = None
    """The last fast checkpoint that was due for the store."""
    _last_fast: tuple[int, float] | None = None
    """The step of the last fast checkpoint, and the `time.monotonic` at which it was complete."""

    def begin_shard(
        self, shard: Shard, request: Request, *, clock: SaveClock
    ) -> tuple[Transaction[Any], Callable[[], SaveResult]]:
        """See `StateSaver.begin_shard`. Only a `DirectoryShard` goes to the fast tier."""
        if not isinstance(shard, DirectoryShard):  # no other shard can move to the store when the fast tier fails
            return super().begin_shard(shard, request, clock=clock)
        if request.options["link"]:
            raise InvalidInput(
                "A hard link is not read, and a fast checkpoint has the digests of all its files",
                hint="Save without link, or open the store without a fast tier",
            )
        storage, upload, publisher = self._target(request, StateOptions())
        shard.move(storage, upload)
        transaction = Transaction.begin(self.job.group, publisher, shard, request, clock=clock)
        return transaction, lambda: self._finish(transaction, shard)

    def _target(self, request: Request, options: StateOptions) -> Target:
        if options.incremental:
            raise InvalidInput(
                "An incremental save takes over files of the checkpoint before, and a fast checkpoint has all its own",
                hint="Save without incremental, or open the store without a fast tier",
            )
        place = self.open_place(request.step)
        upload = place.transfer.upload
        doubled = upload if place.tier.copies == 1 else partial(doubled_upload, place, upload)
        return place.disk.storage, doubled, FastPublisher(self.job, place)

    def _finish(self, transaction: Transaction[Any], shard: StateShard | DirectoryShard) -> SaveResult:
        """See `StateSaver._finish`. If the disk of a node is full or a node cannot be reached, save to the store."""
        job, place = self.job, self.open_place(None)
        place.settle()  # a disk has room for what is being saved beside what stays, and for no more
        try:
            return self._offered(place, transaction.finish(shard))
        except (StorageFull, StorageUnavailable) as error:
            if error.committed is not False:
                raise
            step, rank = transaction.request.step, job.group.rank
            emit(FastBypassed(step=step, rank=rank, error=error.message, store=job.storage.uri))
        shard.move(job.storage, job.transfer.upload)
        with making_room(job):
            record: Record = transaction.elsewhere(LogPublisher(job)).finish(shard)
        if place.members.is_reporter:  # what somebody read, or what drained, is superfluous now and may fill the disk
            place.delete_old()
        self._last_record = record, time.monotonic()
        return SaveResult(files_of(job, record))

    def _offered(self, place: FastPlace, certificate: Certificate) -> SaveResult:
        """Offer a whole fast checkpoint to the drainer, and return it."""
        if self._drainer is None:
            self._drainer = Drainer(self.job, place)
        manifest = certificate.manifest
        self._last_fast = manifest.step, time.monotonic()
        this = Candidate(
            number=certificate.save_number, step=manifest.step, committed_at=math.nan, metrics=manifest.metrics
        )
        is_due = place.tier.is_due(this, self._last_due)
        if is_due:
            self._last_due = this
        drain = self._drainer.offer(certificate, is_due=is_due)
        return SaveResult(fast_files_of(self.job, place, certificate), drain, partial(self._drainer.want, drain))

    def drain_newest(self, timeout_seconds: float | None) -> Drain | None:
        """See `StateSaver.drain_newest`. It need not be due. None also if the last save went to the store."""
        if self._drainer is None or self._last_fast is None:
            return None
        newest = self._drainer.drain_newest()
        self._drainer.finish(timeout_seconds)
        return None if self._last_record and self._last_record[1] > self._last_fast[1] else newest

    def health(self, resumed: ResumedFrom | None) -> StoreHealth:
        drains = self._drainer.health() if self._drainer else None
        return health_of(self._last_fast, self._last_record, drains, resumed)

    def close(self, timeout_seconds: float | None = None) -> None:
        """Bring the newest fast checkpoint into the store within that time, and give the memory back.

        No save is in flight. Without a time the drain goes on until the store does not answer.
        """
        if self._drainer is not None:
            self._drainer.close(timeout_seconds)
        super().close(timeout_seconds)
