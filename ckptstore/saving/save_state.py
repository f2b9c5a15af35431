"""Saving a state: at once, or staged and then in the background. The story itself is in `ckptstore.saving.story`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ckptstore.errors import CheckpointDamaged, CkptstoreError, FileMissing, InvalidInput, RankFailed
from ckptstore.events import StateStaged, emit
from ckptstore.format.layout import Attempt
from ckptstore.format.record import Record
from ckptstore.group import Beat
from ckptstore.job import Job
from ckptstore.saving import story
from ckptstore.saving.background import Background, PendingSave
from ckptstore.saving.log_keeper import LogKeeper
from ckptstore.saving.phases import SaveClock
from ckptstore.saving.request import Request
from ckptstore.saving.staging import Staging
from ckptstore.saving.state_shard import StateOptions, StateShard
from ckptstore.saving.upload_process import Uploader
from ckptstore.state.live.apply import collect
from ckptstore.state.tensors import device
from ckptstore.state.write.agree import Negotiator
from ckptstore.state.write.incremental import Kept, kept_file_name
from ckptstore.transfer import Stored
from ckptstore.transfer.planned import PlannedFile


@dataclass(kw_only=True)
class StateSaver:
    """What one process keeps from one save of a state to the next: plans, staging memory, an upload process."""

    job: Job
    background: Background
    _negotiator: Negotiator = field(default_factory=Negotiator)
    _staging: dict[bool, Staging] = field(default_factory=dict)
    _uploader: Uploader | None = None
    _kept: Kept | None = None
    """What this rank has in the checkpoint that this job committed last, if that save was incremental."""

    def save(self, state: Mapping[str, Any], request: Request, *, options: StateOptions, clock: SaveClock) -> Record:
        """Save a state; returns when it is committed. Collective."""
        shard = self._shard(state, options, upload=self.job.transfer.upload)
        record = story.save(self.job.group, LogKeeper(self.job), shard, request, clock=clock)
        self._kept = shard.kept
        return record

    def save_async(
        self,
        state: Mapping[str, Any],
        request: Request,
        done: Callable[[Record], Any],
        *,
        options: StateOptions,
        uploader: str,
        clock: SaveClock,
    ) -> PendingSave:
        """Save a copy of a state in the background, where no other save is; returns when the copy is made. Collective.

        `done` makes the result of the pending save from the record of the commit. The clock was started by the call.
        """
        in_process = uploader == "process"
        if in_process:  # before anything is agreed on: it may not be possible here
            with contextlib.suppress(RankFailed):  # tried again where all ranks hear of it
                self.upload_process()
        upload = _StagedUpload(self, in_process=in_process)
        shard, keeper = self._shard(state, options, upload=upload), LogKeeper(self.job)
        begun = story.begin(self.job.group, keeper, shard, request, clock=clock)
        staged = _Staged(shard)

        def finish() -> Any:
            record = story.finish(keeper, staged, begun)
            self._kept = shard.kept
            return done(record)

        try:
            staged.stage(lambda: self._staging_for(shared=in_process))
            clock.ended("stage")
            size_bytes = sum(source.size_bytes for _, source in shard.sources)
            pending = PendingSave(request.step, stalled_seconds=clock.released())
            rank = self.job.group.rank
            emit(StateStaged(step=pending.step, rank=rank, size_bytes=size_bytes, seconds=pending.stalled_seconds))
            return self.background.start(pending, finish)
        except BaseException:
            begun.lane.close()
            raise

    def warm_up(self, state: Mapping[str, Any], *, options: StateOptions, uploader: str) -> None:
        """Do now what only a first asynchronous save would do. Collective; nothing is written."""
        shard = self._shard(state, options, upload=self.job.transfer.upload)
        request = Request.of(step=0, kind="state", metrics=None, metadata=None, exists="replace")
        story.meet(self.job.group, "warm up", shard, request, lambda _decision, _beat: {})
        shard.plan()
        sizes = [source.size_bytes for _, source in shard.sources]
        self._staging_for(shared=uploader == "process").reserve(sizes)
        if uploader == "process":
            self.upload_process()

    def upload_process(self) -> Uploader:
        """The upload process, started when it is needed first."""
        if self._uploader is None:
            job = self.job
            self._uploader = Uploader(
                job.storage, config=job.config.transfer, retry=job.config.retry, rank=job.group.rank
            )
        return self._uploader

    def forget_upload_process(self) -> None:
        """After it failed: the next save starts another one."""
        uploader, self._uploader = self._uploader, None
        if uploader is not None:
            uploader.close()

    def close(self) -> None:
        """Give memory and process back. No save is in flight."""
        for staging in self._staging.values():
            staging.close()
        self.forget_upload_process()

    def staged_buffers(self) -> Sequence[Any]:
        """The shared buffers, in the order of the files."""
        return self._staging[True].buffers

    def _shard(self, state: Mapping[str, Any], options: StateOptions, *, upload: Any) -> StateShard:
        if options.incremental not in (False, True, "reference"):
            raise InvalidInput(f"incremental is {options.incremental!r}, it is True, False or 'reference'")
        if options.incremental == "reference":  # stock readers look in one directory
            options = replace(options, stock_readable=False)
        job = self.job
        return StateShard(
            lambda: collect(state),
            rank=job.group.rank,
            world_size=job.group.world_size,
            negotiator=self._negotiator,
            storage=job.storage,
            upload=upload,
            options=replace(options, num_prefixes=self.job.config.num_prefixes),
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

    def _staging_for(self, *, shared: bool) -> Staging:
        if shared not in self._staging:
            self._staging[shared] = Staging(
                shared=shared, num_threads=self.job.config.transfer.num_threads, device=device
            )
        return self._staging[shared]


class _Staged:
    """A shard whose files are copies. What kept them from being copied is raised where all ranks hear of it."""

    def __init__(self, shard: StateShard) -> None:
        self._shard = shard
        self._error: Exception | None = None
        self.describe, self.decide, self.hear, self.join = shard.describe, shard.decide, shard.hear, shard.join

    def stage(self, staging: Callable[[], Staging]) -> None:
        """Copy everything that this rank will write."""
        try:
            self._shard.plan()
            files = [PlannedFile(name, source) for name, source in self._shard.sources]
            staged = staging().stage(files, self._shard.launched)
            self._shard.sources = [(file.key, file.source) for file in staged]
        except Exception as error:  # no memory, for instance
            self._error = error

    def store(self, attempt: Attempt, beat: Beat) -> bytes:
        if self._error is not None:
            raise self._error
        return self._shard.store(attempt, beat)


class _StagedUpload:
    """Uploads a shard's staged files where the caller wants it; what the leader adds goes from this process."""

    def __init__(self, saver: StateSaver, *, in_process: bool) -> None:
        self._saver = saver
        self._is_staged = in_process

    def __call__(self, files: Sequence[PlannedFile], *, beat: Beat) -> list[Stored]:
        if not self._is_staged:
            return self._saver.job.transfer.upload(files, beat=beat)
        self._is_staged = False
        try:
            return self._saver.upload_process().upload(files, self._saver.staged_buffers(), beat=beat)
        except CkptstoreError:
            self._saver.forget_upload_process()
            raise
