"""Saving a state: at once, or staged and then in the background. And files, where there is a fast tier.

The story itself is in `ckptstore.saving.transaction`.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from ckptstore.errors import (
    CheckpointDamaged,
    FileMissing,
    InvalidInput,
    StorageFull,
    StorageUnavailable,
    StoreMissing,
)
from ckptstore.events import FastBypassed, StateStaged, emit
from ckptstore.fast.certificate import Certificate
from ckptstore.fast.partner import DoubledUpload
from ckptstore.format.layout import Attempt
from ckptstore.format.record import Record
from ckptstore.job import Job
from ckptstore.retention import Candidate
from ckptstore.runtime.beat import Beat
from ckptstore.saving.background import Background, PendingSave
from ckptstore.saving.directory_shard import DirectoryShard
from ckptstore.saving.drain import Drain, Drainer
from ckptstore.saving.drain.health import ResumedFrom, StoreHealth, health_of
from ckptstore.saving.fast_publisher import FastPublisher
from ckptstore.saving.log_publisher import LogPublisher
from ckptstore.saving.phases import SaveClock
from ckptstore.saving.request import Request
from ckptstore.saving.shard import Shard
from ckptstore.saving.staging import Staging
from ckptstore.saving.state_shard import StateOptions, StateShard
from ckptstore.saving.transaction import Transaction, meet
from ckptstore.state.live.apply import collect
from ckptstore.state.tensors import device
from ckptstore.state.write.incremental import Kept, kept_file_name
from ckptstore.state.write.memo import SaveMemo
from ckptstore.storage.base import Storage
from ckptstore.transfer import Transfer


class FastSaved(NamedTuple):
    """A fast checkpoint, and its way into the store."""

    certificate: Certificate
    drain: Drain


Saved = Record | FastSaved
"""What a save leaves: a record of the log, or a fast checkpoint."""


class _Target(NamedTuple):
    """Where a state goes first."""

    storage: Storage
    transfer: Transfer
    publisher: LogPublisher | FastPublisher


@dataclass(kw_only=True)
class StateSaver:
    """What one process keeps from one save of a state to the next: plans and staging memory."""

    job: Job
    background: Background
    _memo: SaveMemo = field(default_factory=SaveMemo)
    _staging: Staging | None = None
    _kept: Kept | None = None
    """What this rank has in the checkpoint that this job committed last, if that save was incremental."""
    _drainer: Drainer | None = None
    _last_due: Candidate | None = None
    """The fast checkpoint that was due last to be brought into the store."""
    _last_fast: tuple[int, float] | None = None
    """The step of the last fast checkpoint, and when it was complete, as `time.monotonic` has it."""
    _last_record: tuple[Record, float] | None = None
    """What was saved to the store directly last, and when."""

    def save(self, state: Mapping[str, Any], request: Request, *, options: StateOptions, clock: SaveClock) -> Saved:
        """Save a state; returns when it is committed, or on the disks of the nodes with a fast tier. Collective."""
        self._give_back()
        target = self._target(request, options)
        shard = self._shard(state, options, target, upload=self._doubled(target.transfer.upload, target))
        transaction = Transaction.begin(self.job.group, target.publisher, shard, request, clock=clock)
        return self._finish(transaction, shard, shard)

    def save_async(
        self,
        state: Mapping[str, Any],
        request: Request,
        done: Callable[[Saved], Any],
        *,
        options: StateOptions,
        max_failures: int = 0,
        clock: SaveClock,
    ) -> PendingSave:
        """Save a copy of a state in the background, where no other save is; returns when the copy is made. Collective.

        `done` makes the result of the pending save from what `save` returns. The clock was started by the call. That
        the job's store is not there counts as a save that has failed, of which `max_failures` in a row are tolerated:
        a network mount may come back.
        """
        target = self._target(request, options)
        shard = self._shard(state, options, target, upload=self._doubled(target.transfer.upload, target))
        try:
            transaction = Transaction.begin(self.job.group, target.publisher, shard, request, clock=clock)
        except StoreMissing as error:
            if self.job.epoch is None:
                raise
            pending = PendingSave(request.step, stalled_seconds=clock.released())
            return self.background.failed(pending, error, max_failures=max_failures)
        staged = _Staged(shard, check_all=self.job.config.transfer.check_copies == "all")

        def finish() -> Any:
            saved = self._finish(transaction, staged, shard)
            self.brought(pending, saved, done)
            return done(saved)

        try:
            staged.stage(self._staging_memory)
            clock.ended("stage")
            size_bytes = sum(source.size_bytes for _, source in shard.sources)
            pending = PendingSave(request.step, stalled_seconds=clock.released())
            rank = self.job.group.rank
            emit(StateStaged(step=pending.step, rank=rank, size_bytes=size_bytes, seconds=pending.stalled_seconds))
            return self.background.start(pending, finish)
        except BaseException:
            transaction.close()
            raise

    def begin_directory(
        self, shard: DirectoryShard, request: Request, *, clock: SaveClock
    ) -> tuple[Transaction[Any], Callable[[], Saved]]:
        """The first meeting of a save of files to the fast tier, and what finishes that save on any thread. Both are
        collective."""
        if request.options["link"]:
            raise InvalidInput(
                "A hard link is not read, and a fast checkpoint has the digests of all its files",
                hint="Save without link, or open the store without a fast tier",
            )
        target = self._target(request, StateOptions())
        shard.move(target.storage, self._doubled(target.transfer.upload, target))
        transaction = Transaction.begin(self.job.group, target.publisher, shard, request, clock=clock)
        return transaction, lambda: self._finish(transaction, shard, shard)

    def brought(self, pending: PendingSave, saved: Saved, done: Callable[[Saved], Any]) -> None:
        """Let a pending save say when its fast checkpoint is in the store."""
        if isinstance(saved, FastSaved):
            pending.brought_by(lambda timeout_seconds: done(self.durable(saved.drain, timeout_seconds)))

    def _target(self, request: Request, options: StateOptions) -> _Target:
        """Where it goes first. Collective when that is the fast tier and it was not open."""
        job = self.job
        if job.fast_tier is None:
            return _Target(job.storage, job.transfer, LogPublisher(job))
        if options.incremental:
            raise InvalidInput(
                "An incremental save takes over files of the checkpoint before, and a fast checkpoint has all its own",
                hint="Save without incremental, or open the store without a fast tier",
            )
        place = job.open_fast(step=request.step)
        return _Target(place.disk.storage, place.transfer, FastPublisher(job, place))

    def _doubled(self, upload: Any, target: _Target) -> Any:
        """The same, that sends the files to the partner too, where the fast tier has two copies."""
        place = self.job.fast
        if place is None or place.tier.copies == 1 or isinstance(target.publisher, LogPublisher):
            return upload
        return DoubledUpload(place, upload)

    def _finish(self, transaction: Transaction[Any], stored: Shard, shard: StateShard | DirectoryShard) -> Saved:
        """What follows the agreement, on any thread. Where the disk of a node is full, or a node cannot be reached, it
        goes to the store."""
        job = self.job
        if isinstance(transaction.publisher, LogPublisher):
            record: Record = transaction.finish(stored)
            self._kept = shard.kept if isinstance(shard, StateShard) else None
            self._last_record = record, time.monotonic()
            return record
        assert job.fast is not None  # its publisher has it
        job.fast.settle()  # a disk has room for what is being saved beside what stays, and for no more
        try:
            return self._offered(transaction.finish(stored))
        except (StorageFull, StorageUnavailable) as error:
            if error.committed is not False:
                raise
            emit(
                FastBypassed(
                    step=transaction.request.step,
                    rank=job.group.rank,
                    error=error.message,
                    store=job.storage.uri,
                )
            )
        shard.move(job.storage, job.transfer.upload)
        direct: Transaction[Record] = transaction.elsewhere(LogPublisher(job))
        record = direct.finish(stored)
        self._last_record = record, time.monotonic()
        return record

    def _offered(self, certificate: Certificate) -> FastSaved:
        """A fast checkpoint is whole: it is brought into the store, if it is due."""
        place = self.job.fast
        assert place is not None  # it was saved there
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
        return FastSaved(certificate, self._drainer.offer(certificate, is_due=is_due))

    def durable(self, drain: Drain, timeout_seconds: float | None) -> Record:
        """Wait until a fast checkpoint, or a newer one, is in the store. All ranks call it where it is not due."""
        assert self._drainer is not None  # the drain comes from it
        self._drainer.want(drain)
        return drain.result(timeout_seconds)

    def drain_newest(self, timeout_seconds: float | None) -> Drain | None:
        """Bring the newest fast checkpoint into the store, due or not, and wait; None where there is none to bring. All
        ranks call it."""
        if self._drainer is None:
            return None
        newest = self._drainer.drain_newest()
        self._drainer.finish(timeout_seconds)
        return newest

    def health(self, resumed: ResumedFrom | None) -> StoreHealth:
        """How far the store is behind what this process has saved, or resumed from. No request is made."""
        drains = self._drainer.health() if self._drainer else None
        return health_of(self._last_fast, self._last_record, drains, resumed)

    def warm_up(self, state: Mapping[str, Any], *, options: StateOptions) -> None:
        """Do now what only a first asynchronous save would do. Collective; nothing is written."""
        job = self.job
        target = _Target(job.storage, job.transfer, LogPublisher(job))
        shard = self._shard(state, options, target, upload=job.transfer.upload, compares_replicas=False)
        request = Request.of(step=0, kind="state", metrics=None, metadata=None, exists="replace")
        meet(job.group, "warm up", shard, request, lambda _decision: {})
        shard.plan()
        self._staging_memory().reserve([source.size_bytes for _, source in shard.sources])

    def prepare(self, sizes_bytes: Sequence[int]) -> None:
        """Have memory for a save of files of these sizes made in the background."""
        self._staging_memory().prepare(sizes_bytes)

    def _give_back(self) -> None:
        """Of a job that saves in other ways: what was made ready for a save in the background."""
        if self._staging is not None and self._staging.is_unused:
            self._staging.close()

    def close(self, timeout_seconds: float | None = None) -> None:
        """Bring the newest fast checkpoint into the store within that time, and give the memory back. No save is in
        flight. Without a time it is tried until the store does not answer."""
        if self._drainer is not None:
            self._drainer.close(timeout_seconds)
        if self._staging is not None:
            self._staging.close()

    def _shard(
        self,
        state: Mapping[str, Any],
        options: StateOptions,
        target: _Target,
        *,
        upload: Any,
        compares_replicas: bool = True,
    ) -> StateShard:
        if options.incremental not in (False, True, "reference"):
            raise InvalidInput(f"incremental is {options.incremental!r}, it is True, False or 'reference'")
        if options.incremental == "reference":  # stock readers look in one directory
            options = replace(options, stock_readable=False)
        job = self.job
        options = replace(
            options,
            num_prefixes=job.config.num_prefixes,
            compare_every=job.config.compare_every if compares_replicas else 0,
        )
        return StateShard(
            lambda: collect(state),
            rank=job.group.rank,
            world_size=job.group.world_size,
            memo=self._memo,
            storage=target.storage,
            upload=upload,
            options=options,
            before=lambda: self._before(live_only=options.incremental == "reference"),
        )

    def _before(self, *, live_only: bool) -> Kept | None:
        """What this rank has in the latest checkpoint; with `live_only`, as far as it lies in live ones."""
        job = self.job
        newest = job.log.newest()
        live = job.log.records(newest.state.live) if newest else []
        if not live or live[-1].entry.kind != "state" or live[-1].entry.world_size != job.group.world_size:
            return None
        kept = self._kept
        if kept is None or kept.attempt != live[-1].entry.attempt:
            kept = self._stored_kept(live[-1])
        if kept is None:
            return None
        attempts = {record.entry.attempt for record in live} if live_only else {live[-1].entry.attempt}
        return kept.only_in(attempts)

    def _stored_kept(self, record: Record) -> Kept | None:
        """As it is stored beside a checkpoint that an earlier start of the job saved."""
        key = record.entry.prefix + kept_file_name(self.job.group.rank)
        try:
            return Kept.decode(self.job.storage.read(key), attempt=record.entry.attempt, file=key)
        except (FileMissing, CheckpointDamaged):
            return None

    def _staging_memory(self) -> Staging:
        if self._staging is None:
            # A copy never waits: more threads than processors make it slower.
            num_threads = min(self.job.config.transfer.num_threads, os.cpu_count() or 1)
            self._staging = Staging(num_threads=num_threads, device=device)
        return self._staging


class _Staged:
    """A shard whose files are copies. What kept them from being copied is raised where all ranks hear of it."""

    def __init__(self, shard: StateShard, *, check_all: bool) -> None:
        self._shard = shard
        self._check_all = check_all
        self._error: Exception | None = None
        self.describe, self.decide, self.hear, self.join = shard.describe, shard.decide, shard.hear, shard.join

    def stage(self, staging: Callable[[], Staging]) -> None:
        """Copy everything that this rank will write."""
        try:
            self._shard.stage(staging().stage, check_all=self._check_all)
        except Exception as error:  # no memory, for instance
            self._error = error

    def store(self, attempt: Attempt, beat: Beat) -> bytes:
        if self._error is not None:
            raise self._error
        return self._shard.store(attempt, beat)
