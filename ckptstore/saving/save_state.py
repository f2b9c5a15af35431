"""Save a state: synchronously, or staged and then in the background."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

from ckptstore.errors import (
    CheckpointDamaged,
    CheckpointGone,
    CkptstoreError,
    FileMissing,
    InvalidInput,
    StoreMissing,
)
from ckptstore.events import StateStaged, emit
from ckptstore.format.record import Record
from ckptstore.job import Job
from ckptstore.loading.checkpoint_files import CheckpointFiles, files_of
from ckptstore.saving.background import Background, PendingSave
from ckptstore.saving.directory_shard import DirectoryShard
from ckptstore.saving.health import ResumedFrom, StoreHealth, health_of
from ckptstore.saving.log_publisher import LogPublisher, begin_in_store, making_room
from ckptstore.saving.phases import SaveClock
from ckptstore.saving.request import Request
from ckptstore.saving.shard import Shard
from ckptstore.saving.staging import Staging
from ckptstore.saving.state_shard import Before, StateOptions, StateShard
from ckptstore.saving.transaction import Publisher, Transaction, meet
from ckptstore.state.live.apply import collect
from ckptstore.state.tensors import device
from ckptstore.state.write.assignment import SaveMemo
from ckptstore.state.write.incremental import Kept, kept_file_name
from ckptstore.storage.base import Storage
from ckptstore.transfer.moves import Upload


class Later(Protocol):
    """The drain of a checkpoint that was saved elsewhere first."""

    attempt: str

    def done(self) -> bool:
        """Return True once the drain has ended, with or without success."""

    def error(self) -> CkptstoreError | None:
        """Return the drain's error; None while it runs, and if it has succeeded."""

    @property
    def superseded_by(self) -> Record | None:
        """The record of a newer checkpoint that was drained in its place; None if there is none."""

    def result(self, timeout_seconds: float | None = None) -> Record:
        """Wait until the checkpoint or a newer one is in the store, and return its record."""


class SaveResult(NamedTuple):
    """The result of a save."""

    files: CheckpointFiles
    later: Later | None = None
    """The drain that follows; None if the save went to the store."""
    want: Callable[[], None] = lambda: None
    """Asks for that drain, though it may not be due, before somebody waits for it. Collective unless it is due."""


Target = tuple[Storage, Upload, Publisher[Any]]
"""The place to which a state is saved first."""


@dataclass(kw_only=True)
class StateSaver:
    """The saver of states of one process. It keeps plans and staging memory from save to save."""

    job: Job
    background: Background
    _memo: SaveMemo = field(default_factory=SaveMemo)
    _staging: Staging | None = None
    _kept: Kept | None = None
    """The files of this rank in the checkpoint that this job committed last, if that save was incremental."""
    _next_kept: Kept | None = None
    """The same of the save that is not committed yet."""
    _last_record: tuple[Record, float] | None = None
    """The record of the last save that went to the store directly, and its moment of `time.monotonic`."""

    def save(
        self, state: Mapping[str, Any], request: Request, *, options: StateOptions, clock: SaveClock
    ) -> SaveResult:
        """Save a state, and return once it is committed or, with a fast tier, complete on the nodes. Collective."""
        if self._staging is not None and self._staging.is_unused:  # memory that a resume has prepared
            self._staging.close()
        storage, upload, publisher = self._target(request, options)
        shard = self._shard(state, options, storage, upload)
        transaction = Transaction.begin(self.job.group, publisher, shard, request, clock=clock)
        return self._finish(transaction, shard)

    def save_async(
        self,
        state: Mapping[str, Any],
        request: Request,
        done: Callable[[SaveResult], Any],
        *,
        options: StateOptions,
        max_failures: int = 0,
        clock: SaveClock,
    ) -> PendingSave:
        """Save a copy of a state in the background, and return once the copy is made. Collective.

        No other save may be in flight. `done` converts what `save` returns to the result of the pending save. `clock`
        was started by the call. A missing store counts as a failed save, of which `max_failures` in a row are
        tolerated: a network mount may come back.
        """
        storage, upload, publisher = self._target(request, options)
        shard = self._shard(state, options, storage, upload)
        try:
            transaction = Transaction.begin(self.job.group, publisher, shard, request, clock=clock)
        except StoreMissing as error:
            if self.job.epoch is None:
                raise
            pending = PendingSave(request.step, stalled_seconds=clock.released())
            return self.background.failed(pending, error, max_failures=max_failures)

        def finish() -> Any:
            saved = self._finish(transaction, shard)
            self.watch(pending, saved, done)
            return done(saved)

        try:
            check_all = self.job.config.transfer.check_copies == "all"
            size_bytes = shard.stage(lambda *files: self._staging_memory().stage(*files), check_all=check_all)
            clock.ended("stage")
            pending = PendingSave(request.step, stalled_seconds=clock.released())
            rank = self.job.group.rank
            emit(StateStaged(step=pending.step, rank=rank, size_bytes=size_bytes, seconds=pending.stalled_seconds))
            return self.background.start(pending, finish)
        except BaseException:
            transaction.close()
            raise

    def begin_shard(
        self, shard: Shard, request: Request, *, clock: SaveClock
    ) -> tuple[Transaction[Any], Callable[[], SaveResult]]:
        """Let the ranks agree on a save of files. Return the transaction, and a function that finishes it on any
        thread. Both calls are collective."""
        transaction, finish = begin_in_store(self.job, shard, request, clock=clock)

        def finished() -> SaveResult:
            files = finish()
            if files.record is not None:
                self._last_record = files.record, time.monotonic()
            return SaveResult(files)

        return transaction, finished

    def _target(self, request: Request, options: StateOptions) -> Target:
        """Return the place to save to first. Collective if it has to be opened."""
        job = self.job
        return job.storage, job.transfer.upload, LogPublisher(job)

    def _finish(self, transaction: Transaction[Any], shard: StateShard | DirectoryShard) -> SaveResult:
        """Finish the save after the agreement, on any thread."""
        self._next_kept = None
        with making_room(self.job):
            record: Record = transaction.finish(shard)
        self._kept = self._next_kept
        self._last_record = record, time.monotonic()
        return SaveResult(files_of(self.job, record))

    def watch(self, pending: PendingSave, saved: SaveResult, done: Callable[[SaveResult], Any]) -> None:
        """Connect a pending save to the drain of its checkpoint, if there is one."""
        if (later := saved.later) is None:
            return

        def durable(timeout_seconds: float | None) -> Any:
            saved.want()
            return done(SaveResult(files_of(self.job, later.result(timeout_seconds))))

        pending.brought_by(durable)

    def drain_newest(self, timeout_seconds: float | None) -> Later | None:
        """Drain the newest checkpoint, and wait for it; None if there is none. All ranks call it."""
        return None

    def health(self, resumed: ResumedFrom | None) -> StoreHealth:
        """Return the lag of the store behind the saves of this process. No request is made."""
        return health_of(None, self._last_record, None, resumed)

    def warm_up(self, state: Mapping[str, Any], *, options: StateOptions) -> None:
        """Do the one-time work of a first asynchronous save now. Collective; nothing is written."""
        job = self.job
        shard = self._shard(state, options, job.storage, job.transfer.upload, compares_replicas=False)
        request = Request.of(step=0, kind="state", metrics=None, metadata=None, exists="replace", **options.agreed)
        meet(job.group, "warm up", shard, request, lambda _request, _decision: {})
        self._staging_memory().reserve([source.size_bytes for _, source in shard.plan().sources])

    def prepare(self, sizes_bytes: Sequence[int]) -> None:
        """Allocate memory in the background for a save of files of these sizes."""
        self._staging_memory().prepare(sizes_bytes)

    def close(self, timeout_seconds: float | None = None) -> None:
        """Free the staging memory. No save may be in flight."""
        if self._staging is not None:
            self._staging.close()

    def _shard(
        self,
        state: Mapping[str, Any],
        options: StateOptions,
        storage: Storage,
        upload: Upload,
        *,
        compares_replicas: bool = True,
    ) -> StateShard:
        if options.incremental not in (False, True, "reference"):
            raise InvalidInput(f"incremental is {options.incremental!r}, it is True, False or 'reference'")
        if options.stock_readable not in (True, False, "auto"):
            raise InvalidInput(f"stock_readable is {options.stock_readable!r}, it is True, False or 'auto'")
        if options.incremental == "reference":  # stock readers look in one directory
            if options.stock_readable is True:
                raise InvalidInput(
                    "incremental='reference' leaves files where stock readers do not look, and stock_readable is True",
                    hint="Give incremental=True, which links or copies the files, or leave stock_readable out",
                )
            options = replace(options, stock_readable=False)
        job = self.job
        options = replace(
            options,
            algorithm=job.config.transfer.digest,
            num_prefixes=job.config.num_prefixes,
            apart=job.policy.thins(),
            compare_every=job.config.compare_every if compares_replicas else 0,
        )
        return StateShard(
            lambda: collect(state),
            rank=job.group.rank,
            world_size=job.group.world_size,
            memo=self._memo,
            storage=storage,
            upload=upload,
            options=options,
            before=Before(lambda: self._before(live_only=options.incremental == "reference"), self._set_next),
        )

    def _set_next(self, files: Kept) -> None:
        self._next_kept = files

    def _before(self, *, live_only: bool) -> Kept | None:
        """Return the files of this rank that an incremental save may take over; None if there are none.

        They are those of the latest checkpoint that lie in its own directory or, with `live_only`, in that of any live
        checkpoint.
        """
        job = self.job
        newest = job.log.newest()
        live = job.log.records(newest.state.in_order()) if newest else []
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
        """Return the list of this rank's files that is stored in a checkpoint; None if it is missing or damaged."""
        files, name = files_of(self.job, record), kept_file_name(self.job.group.rank)
        try:
            receipt = files.read_manifest()[0].by_name.get(name)
            if receipt is None:
                return None
            return Kept.decode(files.read_file(receipt), attempt=record.entry.attempt, file=name)
        except (FileMissing, CheckpointDamaged, CheckpointGone):
            return None

    def _staging_memory(self) -> Staging:
        if self._staging is None:
            # A copy never waits: more threads than processors make it slower.
            num_threads = min(self.job.config.transfer.num_threads, os.cpu_count() or 1)
            self._staging = Staging(num_threads=num_threads, device=device)
        return self._staging
