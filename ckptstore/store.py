"""The class CheckpointStore: a facade, whose methods forward to the rooms of saving and loading."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property, partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from ckptstore import extended
from ckptstore.boundary import bounded
from ckptstore.catalogue import Catalogue
from ckptstore.checkpoint import Checkpoint
from ckptstore.errors import CkptstoreError, InvalidInput, besides
from ckptstore.job import Job

if TYPE_CHECKING:
    from ckptstore.extended import StoreTarget
    from ckptstore.format.naming import Suffix
    from ckptstore.loading.load_report import Dtype, ReadOnce
    from ckptstore.loading.newest import Order
    from ckptstore.saving.background import Background, Deadline, OnBusy, PendingSave
    from ckptstore.saving.health import ResumedFrom, StoreHealth
    from ckptstore.saving.phases import SaveClock
    from ckptstore.saving.request import Exists, Request
    from ckptstore.saving.save_state import SaveResult, StateSaver
    from ckptstore.saving.shard import Shard
    from ckptstore.saving.state_shard import Incremental, StateOptions, StockReadable
    from ckptstore.saving.transaction import Transaction
    from ckptstore.state.read.stored import PerRank


@bounded
class CheckpointStore(Catalogue):
    """The checkpoints of one training run, at one URI.

    Collective methods are called by all ranks in the same order: `save`, `save_async`, `save_directory`, `load`,
    `resume`, `warm_up`, `drain`, `close`. All others are per process. A store is used by one process; its methods that
    are not collective may be called from any thread.

    Saves have one order: a save in flight ends before the next collective call begins. Once the store is closed, every
    method that needs it raises InvalidInput.
    """

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._called: SaveClock | None = None
        """The clock of a call that began before `_clock` was called."""
        self._resumed: ResumedFrom | None = None

    @cached_property
    def _background(self) -> Background:
        from ckptstore.saving.background import Background

        return Background()

    @cached_property
    def _deadline(self) -> Deadline:
        from ckptstore.saving.background import Deadline

        return Deadline()

    def _in_turn(self, *, max_failures: int | None = None) -> Job:
        """Wait for the save in flight, then return the job, for a collective call.

        With `max_failures`, raise the error of that save on every rank, unless it is tolerated.
        """
        job = self._job
        self._background.wait()
        try:
            error = None if max_failures is None else self._background.failure(max_failures=max_failures)
        except InvalidInput as bad:
            error = bad
        if error is not None:
            job.raise_on_all(error)
        return job

    def _checked(self, job: Job, of_state: Callable[[], StateOptions], **request: Any) -> tuple[Request, StateOptions]:
        """Return the checked request and options of a save of a state. If they are bad, raise the error on all ranks;
        only then collective."""
        from ckptstore.saving.transaction import checked

        try:
            options = of_state()
        except CkptstoreError as error:
            job.raise_on_all(error)
        return checked(job.group, kind="state", retention=job.retention, **request, **options.agreed), options

    def _clock(self) -> SaveClock:
        """Return the clock of the present call of a save."""
        from ckptstore.saving.phases import SaveClock

        clock, self._called = self._called or SaveClock(), None
        return clock

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        *,
        metrics: Mapping[str, Any] | None = None,
        metadata: Mapping[str, Any] | None = None,
        exists: Exists = "replace",
        incremental: Incremental = False,
        allow_pickle: bool = False,
        stock_readable: StockReadable = "auto",
        dtype: Mapping[str, Any] | None = None,
    ) -> Checkpoint:
        """Save a state from all ranks at once. Collective; returns, or raises, as `save_directory` does.

        Args:
            state: a dict of modules, optimizers, schedulers, DTensors, tensors, objects with state_dict and
                load_state_dict, and plain Python values, nested as you like. Training is not changed by a save.
            step, metrics, metadata, exists: as for `save_directory`.
            incremental: take over files of the latest checkpoint that have hardly changed, and write only the rest.
                True makes hard links, or copies inside the storage. "reference" refers to files of live checkpoints.
            allow_pickle: store values that have no other form as pickles; the load must allow them too.
            stock_readable: write the metadata of torch's own DCP too: True always, "auto" up to 200,000 chunks and up
                to 10,000 plain values in dicts and lists.

        A tensor that all ranks hold is written once, split over them. A small tensor or a value that differs between
        ranks is stored for each rank. Raises InvalidState, with the key, for a value that cannot be stored, and for a
        number that its dtype of `dtype` cannot hold; InvalidInput for a pattern that casts nothing.
        """
        from ckptstore.saving.state_shard import StateOptions

        clock = self._clock()
        job = self._in_turn(max_failures=0)
        of_state = partial(
            StateOptions.of, dtype, incremental, allow_pickle=allow_pickle, stock_readable=stock_readable
        )
        request, options = self._checked(job, of_state, step=step, metrics=metrics, metadata=metadata, exists=exists)
        return self._saved(self._state_saver.save(state, request, options=options, clock=clock))

    def save_async(
        self,
        step: int,
        state: Mapping[str, Any],
        *,
        metrics: Mapping[str, Any] | None = None,
        metadata: Mapping[str, Any] | None = None,
        exists: Exists = "replace",
        incremental: Incremental = False,
        allow_pickle: bool = False,
        stock_readable: StockReadable = "auto",
        dtype: Mapping[str, Any] | None = None,
        on_busy: OnBusy = "wait",
        max_failures: int = 0,
    ) -> PendingSave:
        """Save a copy of a state in the background. Collective; returns once the copy is made.

        The state may be changed from then on. At most one save is in flight. Its error is raised by `result()`, and on
        every rank by the next save or `close`. No error is lost.

        Args:
            on_busy: while the save before is in flight, "wait" for it, "skip" this one (`PendingSave.skipped`, the
                same on all ranks), or raise SaveBusy ("error").
            max_failures: how many failed saves in a row are only logged before one is raised.

        The other arguments are those of `save`.
        """
        from ckptstore.saving.state_shard import StateOptions

        clock = self._clock()
        if not self._background.is_free(self._job, on_busy, step=step):
            from ckptstore.saving.background import PendingSave

            return PendingSave(step, skipped=True, stalled_seconds=clock.elapsed_seconds)
        job = self._in_turn(max_failures=max_failures)
        of_state = partial(
            StateOptions.of, dtype, incremental, allow_pickle=allow_pickle, stock_readable=stock_readable
        )
        request, options = self._checked(job, of_state, step=step, metrics=metrics, metadata=metadata, exists=exists)
        return self._state_saver.save_async(
            state, request, self._saved, options=options, max_failures=max_failures, clock=clock
        )

    def dcp_target(
        self, *, metrics: Mapping[str, Any] | None = None, metadata: Mapping[str, Any] | None = None
    ) -> StoreTarget:
        """Return a target in this store for `ckptstore.dcp.StoreWriter`, for programs that call `dcp.save` themselves.

        Such a save begins after the save that this store has in flight. If another checkpoint is committed meanwhile,
        it ends with InvalidInput: an older state must not become the latest.
        """
        return extended.StoreTarget(self._job, in_turn=self._in_turn, metrics=metrics, metadata=metadata)

    def warm_up(
        self,
        state: Mapping[str, Any],
        *,
        stock_readable: StockReadable = "auto",
        dtype: Mapping[str, Any] | None = None,
    ) -> None:
        """Make the memory and plans that a first `save_async` with the same `dtype` needs. Collective.

        Raises InvalidInput for a pattern that casts nothing.
        """
        from ckptstore.saving.state_shard import StateOptions

        self._in_turn()
        options = StateOptions.of(dtype, False, allow_pickle=False, stock_readable=stock_readable)
        self._state_saver.warm_up(state, options=options)

    def finish_by(self, seconds: float | None = None) -> bool:
        """Wait for the save in flight, at most `seconds` or the time left since SIGTERM. Return True if it has ended.

        After False, the save still commits if all ranks finish it before they end; otherwise it never becomes visible.
        With a fast tier, the newest checkpoint is also drained, on all ranks; after False it may be on the nodes only.
        """
        left = self._deadline.left_seconds() if seconds is None else seconds
        ends_at = None if left is None else time.monotonic() + left
        if not self._background.wait(left):
            return False
        if self._held.is_closed or self._held.tier is None:
            return True
        drain = self._state_saver.drain_newest(None if ends_at is None else max(0.0, ends_at - time.monotonic()))
        return drain is None or (drain.done() and drain.error() is None)

    def drain(self, timeout_seconds: float | None = None) -> Checkpoint | None:
        """Bring the newest fast checkpoint of this job into the store, and return it as stored there. Collective.

        Return None if there is none: nothing was saved since `open_store`, or the last save went to the store. Raises
        the error of the drain, and TimeoutError if it has not ended in time; it goes on in the background then.
        """
        job = self._in_turn(max_failures=0)
        if job.tier is None:
            return None
        drain = self._state_saver.drain_newest(timeout_seconds)
        return None if drain is None else self._checkpoint(drain.result(0.0))

    def health(self) -> StoreHealth:
        """Return how far the store is behind what this process has saved or resumed from. No request is made.

        Without a fast tier it is never behind: a save ends when its checkpoint is in the store.
        """
        from ckptstore.saving.health import health_of

        self._held.check_open()
        if "_state_saver" in self.__dict__:
            return self._state_saver.health(self._resumed)
        return health_of(None, None, None, self._resumed)

    def install_sigterm(self, seconds: float) -> None:
        """Install a handler that notes, on SIGTERM, that this process has `seconds` left; see `stop_requested`.

        A previous handler is called too, unless it is the default one, which ends the process.
        """
        from ckptstore.saving.background import install_sigterm

        install_sigterm(self._deadline, seconds)

    @property
    def stop_requested(self) -> bool:
        """True if SIGTERM came since `install_sigterm`: leave the training loop, and call `finish_by`."""
        return self._deadline.is_set

    def load(
        self,
        state: Mapping[str, Any],
        *,
        include: str | Sequence[str] | None = None,
        strict: bool = True,
        device: Any = None,
        dtype: Dtype = "same",
        read_once: ReadOnce = "rank",
        per_rank: PerRank = "error",
        allow_pickle: bool = False,
    ) -> Checkpoint | None:
        """Load the newest checkpoint that verifies into `state`, in place, and return it. Collective, without a claim.

        An empty store gives None and leaves the state as it is. If a checkpoint is damaged, all ranks move on to the
        one before, and a `CheckpointSkipped` event says why. The `load_report` of the result says what was left out.

        Args:
            include: load only keys that fit a pattern ("model.*") or one of several; each must fit something.
            strict: True if every key of the state must be in the checkpoint, and every key of the checkpoint below a
                name of the state must be in the state. False leaves out keys that one side lacks; some key must match.
            device: where modules on the meta device get their memory. Their buffers outside of the state are made by
                `reset_parameters`, or by `_init_weights` in Hugging Face's models. Without either they stay on meta.
            dtype: "same" if a tensor must have the dtype that was saved, "state" to cast between floating-point ones.
            read_once: "rank": every rank reads what it needs. "node": each node downloads once what its ranks need.
                "job": one rank reads what all ranks need, and broadcasts it.
            per_rank: what to do with values that differed between ranks if the number of ranks has changed: raise an
                "error", take the lowest rank's ("first"), or "skip" them, so that the state keeps its own. A mapping
                chooses by pattern: `{"rng": "skip", "loader*": "first"}`.
            allow_pickle: read values that were saved as pickles; they can execute anything.

        Raises StoreMissing if there is no store, InvalidInput for a pattern that fits nothing, StateMismatch with all
        keys that do not fit, NoUsableCheckpoint (the state may hold anything then).
        """
        options = {"include": include, "strict": strict, "device": device, "dtype": dtype, "read_once": read_once}
        return self._load(state, claim=False, per_rank=per_rank, allow_pickle=allow_pickle, **options)

    def save_directory(
        self,
        step: int,
        path: os.PathLike[str] | str | None,  # in this order it is not checked here: a wrong one is told to all ranks
        *,
        metrics: Mapping[str, Any] | None = None,
        metadata: Mapping[str, Any] | None = None,
        exists: Exists = "replace",
        suffix: Suffix = "auto",
        shared: Collection[str] = (),
        link: bool = False,
    ) -> Checkpoint:
        """Save the files of every rank's directory as one checkpoint. Collective.

        Returns on all ranks once the checkpoint is committed: durable, and visible whole; with a fast tier, once it is
        on the disks of the nodes. The directory may be deleted then. On failure, all ranks raise the same error. If
        `error.committed` is False, the checkpoint can never become visible; the leader removes the written files. A
        rank that loses the leader looks into the log. If that lacks the checkpoint, `error.committed` is None: unknown.

        Args:
            step: an integer of at least 0, the same on all ranks.
            path: this rank's directory, None where it has none. Links are followed inside the directory only. The names
                and bytes of files are stored; permissions, owners, times and empty directories are not.
            metrics: numbers for retention and `best`. What one rank alone gives counts; of unlike values that of the
                lowest rank, with a warning.
            metadata: a dict of what JSON holds; its entries count as metrics do.
            exists: "replace" puts an earlier checkpoint of this step into the trash with the commit, "error" refuses.
            suffix: "auto" puts "-rank=00003" before the extension of names that several ranks have, "always" of all
                names; with "never" such a collision is an error.
            shared: names of files with the same bytes on all ranks that have them; stored once, and checked.
            link: on a disk, make the files hard links if possible. Nothing is copied or read, so such files have no
                digest, and a later write to the source changes the checkpoint.

        Raises InvalidInput and its kin before anything is written, SourceChanged, StorageError, RankFailed,
        RankTimeout, StoreFenced.
        """
        from ckptstore.saving.directory_shard import directory_of

        options: dict[str, Any] = {"metrics": metrics, "metadata": metadata, "exists": exists}
        options |= {"suffix": suffix, "shared": shared, "link": link}
        return save_shard(self, lambda job: directory_of(job, step, path, **options))

    def resume(
        self,
        state: Mapping[str, Any] | None = None,
        *,
        include: str | Sequence[str] | None = None,
        strict: bool = True,
        device: Any = None,
        dtype: Dtype = "same",
        read_once: ReadOnce = "rank",
        per_rank: PerRank = "error",
        allow_pickle: bool = False,
        required: bool = False,
    ) -> Checkpoint | None:
        """Claim the store for this job, load the newest checkpoint that verifies, and return it. Collective.

        All ranks get the same one; None in an empty store. From now on a job that claimed the store before is fenced:
        nothing that it still writes can become visible. The keywords are those of `load`. Without a state nothing is
        loaded: the returned checkpoint has the committed manifest, and every file exists with its size.

        Where there is none, a line of the log names a store with checkpoints beside this place, if there is one. With
        `required`, StoreMissing is raised instead, and nothing is written: this start expects something to resume.

        Raises NoUsableCheckpoint if there are checkpoints but none can be used; StateMismatch.
        """
        from ckptstore.loading.newest import log_neighbour, refuse_load_options, require_checkpoint, resume

        options = {"include": include, "strict": strict, "device": device, "dtype": dtype, "read_once": read_once}
        options |= {"per_rank": per_rank, "allow_pickle": allow_pickle}
        if required:
            require_checkpoint(self._in_turn())
        if state is None:
            refuse_load_options(options)
            files = resume(self._in_turn())
            if files is None:
                log_neighbour(self._job)
                return None
            return self._gone_on_from(Checkpoint(files))
        return self._load(state, claim=True, **options)

    def close(self) -> None:
        """Finish the work in the background, and close connections. Collective if this store has saved.

        Raises the error of the last asynchronous save, unless it was raised before.
        """
        if self._held.is_closed:
            return
        try:
            self._background.wait()
            if "_state_saver" in self.__dict__:
                self._state_saver.close(self._deadline.left_seconds())
            self._saves_ended()
            self._background.raise_failure()
        finally:
            self._held.close()

    def _saves_ended(self) -> None:
        """Do work of a subclass in `close`, after all saves and while the ranks can still meet."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        tier = self._held.tier
        if error is not None and not self._held.is_closed and tier is not None and tier.is_open:
            self._deadline.set(0.0)  # the other ranks may not come, so `close` does not wait for a drain
        with besides(error):
            self.close()

    @cached_property
    def _state_saver(self) -> StateSaver:
        from ckptstore.saving.save_state import StateSaver

        job = self._job
        saver: StateSaver = (
            job.tier.saver(job, self._background) if job.tier else StateSaver(job=job, background=self._background)
        )
        return saver

    def _saved(self, saved: SaveResult) -> Checkpoint:
        return Checkpoint(saved.files)

    def _load(
        self, state: Mapping[str, Any], *, claim: bool, order: Order | None = None, **options: Any
    ) -> Checkpoint | None:
        from ckptstore.loading.load_state import LoadOptions, load_newest
        from ckptstore.loading.newest import log_neighbour, newest_first

        job = self._in_turn()
        try:
            load_options = LoadOptions(**options)
        except CkptstoreError as error:
            job.raise_on_all(error)
        found = load_newest(job, state, load_options, claim=claim, order=order or newest_first)
        if found is None:
            if claim:
                log_neighbour(self._job)
            return None
        checkpoint = Checkpoint(found.files, load_report=found.report)
        if claim:
            self._state_saver.prepare(found.sizes_bytes)
            self._gone_on_from(checkpoint)
        return checkpoint

    def _gone_on_from(self, checkpoint: Checkpoint) -> Checkpoint:
        from ckptstore.saving.health import ResumedFrom

        self._resumed = ResumedFrom.of(checkpoint.step, checkpoint.created_at, is_durable=checkpoint.number is not None)
        return checkpoint


def save_shard(store: CheckpointStore, make: Callable[[Job], tuple[Request, Shard]]) -> Checkpoint:
    """Save the shard that `make` returns, as `save_directory` does. Collective."""
    clock = store._clock()
    job = store._in_turn(max_failures=0)
    _, finish = _begun(store, job, *make(job), clock=clock)
    return finish(None)


def start_shard(
    store: CheckpointStore, make: Callable[[Job], tuple[Request, Shard]], *, ended: Callable[[], object]
) -> PendingSave:
    """Save as `save_shard` does, but in the background after the agreement of the ranks. Collective.

    The source of the shard must not change until `ended` is called, on any thread: the save has ended then.
    """
    from ckptstore.saving.background import PendingSave

    clock = store._clock()
    with ExitStack() as not_started:
        not_started.callback(ended)
        job = store._in_turn(max_failures=0)
        request, shard = make(job)
        transaction, finish_it = _begun(store, job, request, shard, clock=clock)
        not_started.callback(transaction.close)

        def finish() -> Checkpoint:
            try:
                return finish_it(pending)
            finally:
                ended()

        pending = PendingSave(request.step, stalled_seconds=clock.released())
        store._background.start(pending, finish)
        not_started.pop_all()
    return pending


def wait_in_flight(store: CheckpointStore) -> None:
    """Wait for the save in flight, but for no drain. Not collective."""
    store._background.wait()


def _begun(
    store: CheckpointStore, job: Job, request: Request, shard: Shard, *, clock: SaveClock
) -> tuple[Transaction[Any], Callable[[PendingSave | None], Checkpoint]]:
    """Let the ranks agree on a save. Return the transaction, and a function that finishes it for a pending save or
    None. Collective."""
    if job.tier is None:
        from ckptstore.saving.log_publisher import begin_in_store

        direct, stored = begin_in_store(job, shard, request, clock=clock)
        return direct, lambda _pending: Checkpoint(stored())
    saver = store._state_saver
    transaction, finish = saver.begin_shard(shard, request, clock=clock)

    def finished(pending: PendingSave | None) -> Checkpoint:
        saved = finish()
        if pending is not None:
            saver.watch(pending, saved, store._saved)
        return store._saved(saved)

    return transaction, finished


def settle_saves(store: CheckpointStore, *, max_failures: int = 0) -> None:
    """Wait for the save in flight, and raise its error on this rank, unless it was raised before or is tolerated."""
    store._background.wait()
    store._background.raise_failure(max_failures=max_failures)


def load_in_order(
    store: CheckpointStore, state: Mapping[str, Any], order: Order, *, claim: bool, per_rank: PerRank = "error"
) -> Checkpoint | None:
    """Resume, or load without a `claim`, and try the live checkpoints in this `order`. Collective.

    With a `FastOrder` and a claim, checkpoints on the disks of nodes are tried too. If nothing is found, those that the
    order leaves out stay on the nodes.
    """
    return store._load(state, claim=claim, order=order, per_rank=per_rank)
