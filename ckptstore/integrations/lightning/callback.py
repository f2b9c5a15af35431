"""The callback: it listens to the Trainer's hooks, asks the schedule, and saves through the store."""

from __future__ import annotations

import inspect
import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptstore.checkpoint import Checkpoint, files_behind
from ckptstore.errors import CkptstoreError, InvalidInput
from ckptstore.format.manifest import sha256_of
from ckptstore.integrations.lazy_store import LazyStore, StoreSource, reports_to_ray
from ckptstore.integrations.lightning.best import FILE_NAME, mode_in, write_file
from ckptstore.integrations.lightning.ckpt_path import watch_trainers
from ckptstore.integrations.lightning.schedule import Schedule
from ckptstore.integrations.lightning.trainer_parts import (
    Numbers,
    check_strategy,
    count_interrupted_batch,
    found_requeued,
    is_last_epoch,
    leave_finished_epoch,
    leave_finished_pass,
    leave_older_file,
    metrics_of,
    recount_batches,
    state_of,
    warn_of_plateaus,
    warn_of_prefetching,
)
from ckptstore.node_cache import NodeCache, copy_key
from ckptstore.opening import open_store
from ckptstore.runtime.near import meant, nearest

if find_spec("lightning") is None or ("pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules):
    from pytorch_lightning import __version__ as _version
    from pytorch_lightning.callbacks import Checkpoint as _Base
else:
    from lightning.pytorch import __version__ as _version
    from lightning.pytorch.callbacks import Checkpoint as _Base

if TYPE_CHECKING:
    from ckptstore.saving.background import PendingSave
    from ckptstore.store import CheckpointStore

logger = logging.getLogger("ckptstore.lightning")

watch_trainers()

CHECKPOINT_NAME = "checkpoint.ckpt"
"""The name of Lightning's file in a checkpoint, as Ray's callback has it."""

_RETENTION = "give retention=KeepBest(3, metric=..., mode='min') | KeepLatest(1)"
_OF_MODEL_CHECKPOINT = {
    "dirpath": "the store is the first argument",
    "filename": "a checkpoint is known by its step",
    "save_top_k": _RETENTION,
    "mode": _RETENTION,
    "save_on_train_epoch_end": "give every_n_epochs=1 for the ends of epochs alone",
}


class CheckpointStoreCallback(_Base):  # type: ignore[misc] # Lightning is Any to the type checker
    """Saves a Trainer's checkpoints in a store, every rank its own part, and resumes from the newest.

    It replaces `ModelCheckpoint`: with it in the list the Trainer writes no files of its own. Saved and resumed are the
    model, optimizers, schedulers, loops, precision, DataModule, callbacks, random numbers, and the entries of
    `on_save_checkpoint`.
    Nothing is gathered on one rank. Works with one device, DDP, FSDP and ModelParallelStrategy; other strategies are
    refused with InvalidInput.

    The store's retention decides which checkpoints stay, for instance `KeepBest(3, metric="val_loss", mode="min") |
    KeepLatest(1)`.

    Args:
        store: an open store; or a URI, or a function such as `ckptstore.ray.store`: then each process opens its own.
        every_n_train_steps, every_n_epochs, train_time_interval: when to save, one or several of them; when none is
            given, at the end of each epoch and of each validation. A step is one of the optimizer, as in
            `trainer.global_step`, and gives the checkpoint its number.
        monitor: a metric that every checkpoint must have, logged at its own step. If validations log it, a save waits
            for the end of the next validation. If that one does not log it, InvalidInput names the logged metrics.
        save_last: save at the end of training too, where its last step is not saved.
        save_on_exception: save when an exception, Ctrl-C among them, ends the training. All ranks have to meet it; if
            one does not, the save fails after the timeout of the store, with a warning.
        as_file: store the file that Lightning writes, in place of a state: `checkpoint.as_directory()` has it under
            `CHECKPOINT_NAME`, for `ckpt_path` of `fit` and for `load_from_checkpoint`. Lightning gathers it, and
            training waits until it is stored. Takes `resume=False`: Lightning itself resumes, from a `ckpt_path`.
        save_weights_only: save the model alone. Nothing can go on from that, so it takes `resume=False`.
        asynchronous: go on training while the state is stored, with `save_async`.
        resume: claim the store at the start of `fit` and load the newest checkpoint that verifies, unless `ckpt_path`
            is given or this Trainer has trained already.
        save_options: keywords of `save` or `save_async`, such as `{"incremental": True}`.
        load_options: keywords of `resume`, such as `{"per_rank": "first"}` for another number of ranks.
        open_keywords: those of `open_store`, for a URI, or of the function. With `fast`, or an open store that has a
            fast tier, a save is complete when it is on the disks of the nodes.

    `trainer.test(ckpt_path="best")` and its like read the best checkpoint by `monitor`, see `best_model_path`, and with
    "last" the latest.

    An error of a save is raised in the training loop, the same on all ranks; of an asynchronous one, by the next save
    or at the end of training.
    """

    CHECKPOINT_NAME = CHECKPOINT_NAME

    def __init__(
        self,
        store: StoreSource,
        *,
        every_n_train_steps: int | None = None,
        every_n_epochs: int | None = None,
        train_time_interval: timedelta | None = None,
        monitor: str | None = None,
        save_last: bool = False,
        save_on_exception: bool = False,
        as_file: bool = False,
        save_weights_only: bool = False,
        asynchronous: bool = False,
        resume: bool = True,
        save_options: Mapping[str, Any] | None = None,
        load_options: Mapping[str, Any] | None = None,
        **open_keywords: Any,
    ) -> None:
        super().__init__()
        if isinstance(store, str | os.PathLike):
            _check_keywords(open_keywords)
        if save_weights_only and resume:
            raise InvalidInput(
                "save_weights_only=True stores nothing that a training can go on from",
                hint="Give resume=False, and a store of its own beside the one that is resumed from",
            )
        if as_file and (resume or asynchronous):
            raise InvalidInput(
                "as_file=True stores Lightning's own file: nothing copies it in the background, nor loads it here",
                hint="Give resume=False without asynchronous, and fit(ckpt_path=...) the file of store.resume()",
            )
        if load_options and not resume:
            raise InvalidInput("load_options are for a resume, and resume=False loads nothing", hint="Leave them out")
        if train_time_interval is not None and not isinstance(train_time_interval, timedelta):
            raise InvalidInput(f"train_time_interval is {train_time_interval!r}, it is a timedelta")
        if isinstance(store, str | os.PathLike) and monitor is not None and (save_last or save_on_exception):
            open_keywords.setdefault("missing", "worst")  # these saves wait for no metric
        self._lazy_store = LazyStore(store, open_keywords)
        self._schedule = Schedule(
            every_n_train_steps=every_n_train_steps,
            every_n_epochs=every_n_epochs,
            monitor=monitor,
            is_timed=train_time_interval is not None,
        )
        self._interval_seconds = None if train_time_interval is None else train_time_interval.total_seconds()
        self._due_at_seconds = 0.0
        self._saves_last, self._saves_on_exception = save_last, save_on_exception
        self.weights_only, self._as_file = save_weights_only, as_file
        self._monitor = monitor
        self._asynchronous = asynchronous
        self._resume = resume
        self._save_options = dict(save_options or {})
        self._load_options = dict(load_options or {})
        self._pending: PendingSave | None = None
        self._file: tuple[str, str] | None = None
        self._held_file = ExitStack()
        self._is_last_wanted = False
        self.reads: Any = None
        """The path that Lightning reads in the run that has begun; set by Lightning's choice."""
        self._has_left_epoch = self._is_in_epoch = False
        self._numbers: Numbers | None = None
        self.resumed: Checkpoint | None = None
        """The checkpoint that the last `fit` resumed from."""

    def best(self) -> Checkpoint | None:
        """Return the best live checkpoint by `monitor`, the latest if none has it; None in an empty store. Not
        collective.

        With a fast tier only checkpoints in the store count. The store's retention or the metric's name says which way
        is better. Raises InvalidInput when neither does.
        """
        store = self.store
        if not any(self._monitor in entry.checkpoint.metrics for entry in store.entries()):
            return store.latest()
        assert self._monitor is not None  # which no metrics have
        return store.best(self._monitor, mode_in(store.retention, self._monitor))

    @property
    def best_model_score(self) -> float | None:
        """The best checkpoint's value of `monitor`; None if there is none."""
        checkpoint = None if self._monitor is None else self.best()
        return None if checkpoint is None else checkpoint.metrics.get(str(self._monitor))

    @property
    def best_model_path(self) -> str:
        """The weights of `best` as a file in Lightning's format, for `ckpt_path`; empty if there is none.

        One process of each node writes it to the node cache on first use, which takes memory for all weights. It may
        disappear once this process has ended. Raises the errors of `best`.
        """
        checkpoint = self.best()
        return "" if checkpoint is None else self.file_of(checkpoint)

    @best_model_path.setter
    def best_model_path(self, path: str) -> None:
        """Ignore the path: Lightning passes that of a spawned process; this one finds its own."""

    @property
    def last_model_path(self) -> str:
        """The weights of the latest checkpoint in the store, as `best_model_path` has those of the best one."""
        checkpoint = self.store.latest()
        return "" if checkpoint is None else self.file_of(checkpoint)

    def file_of(self, checkpoint: Checkpoint) -> str:
        """Return the path of a checkpoint of this store as a file in Lightning's format, see `best_model_path`."""
        if self._file is not None and self._file[0] == checkpoint.uri:
            return self._file[1]
        self._held_file.close()
        if self._as_file:
            held, name = checkpoint.as_directory(), CHECKPOINT_NAME
        else:
            files, allow = files_behind(checkpoint), bool(self._load_options.get("allow_pickle", False))
            name = FILE_NAME
            held = NodeCache(files.config.cache).fetch_once(
                copy_key(f"{checkpoint.uri}/{FILE_NAME} {sha256_of(files.read_manifest()[1])}"),
                step=checkpoint.step,
                size_bytes=checkpoint.size_bytes,
                download=lambda path: write_file(checkpoint, path, version=_version, allow_pickle=allow),
            )
        self._file = checkpoint.uri, str(self._held_file.enter_context(held) / name)
        return self._file[1]

    def last_to_fit(self, found: str | None) -> str | None:
        """Return the path for `fit(ckpt_path="last")`: Lightning's own, which it has found beside the store, or none.

        The store is read at the start of `fit`, when the ranks can agree on what they read.
        """
        if self.weights_only:
            raise InvalidInput(
                "ckpt_path='last', and save_weights_only=True stores nothing that a training can go on from",
                hint="Load the weights before fit: store.latest().load({'model': module})",
            )
        if self._as_file:
            return self.last_model_path or found
        self._is_last_wanted = True
        return found

    def check_best_fits(self) -> None:
        """Raise InvalidInput unless `best_model_path` is a file that a training can go on from."""
        if self.weights_only or not self._as_file:
            raise InvalidInput(
                "ckpt_path='best' of fit: the file of the best checkpoint has its weights alone",
                hint="To go on from it, call callback.store.roll_back(callback.best().step), and fit(ckpt_path='last')",
            )

    @property
    def store(self) -> CheckpointStore:
        """The store; opened if it is not open."""
        return self._lazy_store.get()

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Refuse a Trainer that cannot be saved, before anything is trained, and ranks that read different files."""
        if stage == "fit":
            check_strategy(trainer.strategy)
        elif self._file is not None:
            trainer.strategy.optimizers = []  # those of a `fit` before; ModelParallelStrategy wants their states too
        if self._file is not None and self._file[1] == self.reads:
            is_same = trainer.strategy.broadcast(self._file[0]) == self._file[0]
            if not trainer.strategy.reduce_boolean_decision(is_same):
                raise InvalidInput(
                    f"the ranks have found different checkpoints, this one {self._file[0]}: a job saves into the store",
                    hint="Call it again",
                )

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Resume: model and optimizers are in their final form by now, under every strategy."""
        self.resumed, self._has_left_epoch = None, False
        is_last, self._is_last_wanted = self._is_last_wanted, False
        if trainer.fast_dev_run:
            if is_last:
                logger.warning("fast_dev_run=True: nothing of the store is loaded for ckpt_path='last'")
            return
        resumes = is_last or (self._resume and trainer.global_step == 0)
        if resumes and self._goes_first(trainer, is_last=is_last):
            options = {"strict": pl_module.strict_loading, **self._load_options}
            state = state_of(trainer)
            self.resumed, self._numbers = self.store.resume(state, **options), state["rng"]
            self._is_in_epoch = not trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
            self._has_left_epoch = self.resumed is not None and leave_finished_epoch(trainer)
            if is_last and self.resumed is None:
                logger.warning("ckpt_path='last', and the store has no checkpoint: the training begins anew")
        self._schedule.restart(step=trainer.global_step)
        self._due_at_seconds = time.monotonic() + (self._interval_seconds or 0)

    def _goes_first(self, trainer: Any, *, is_last: bool) -> bool:
        """Return True if the store is asked, and no file of Lightning's own: on all ranks alike."""
        if not trainer.ckpt_path:
            return True
        if not is_last and not found_requeued(trainer):
            return False
        latest = self.store.latest()
        step = trainer.strategy.broadcast(-1 if latest is None else latest.step)
        return step >= 0 and leave_older_file(trainer, step)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin the schedule at the step of a `ckpt_path` too, and see to the loaders: they have positions by now."""
        self._schedule.restart(step=trainer.global_step)
        warn_of_prefetching(trainer)
        if self.resumed is None:
            return
        warn_of_plateaus(trainer)
        if self._numbers is not None and (self._has_left_epoch or self._is_in_epoch):
            self._numbers.set_again()  # Lightning has made an iterator since, which a run without an end has not
        if self._has_left_epoch:
            leave_finished_pass(trainer)
        else:
            recount_batches(trainer)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Save by steps and by time."""
        now = {"step": trainer.global_step, "is_last_batch": trainer.is_last_batch, "is_time": self._is_time(trainer)}
        if self._schedule.at_batch_end(**now, metrics=trainer.callback_metrics):
            self._save(trainer)

    def _is_time(self, trainer: Any) -> bool:
        """Return True on all ranks when the interval is over on rank 0."""
        if self._interval_seconds is None:
            return False
        now = time.monotonic()
        is_time = bool(trainer.strategy.broadcast(now >= self._due_at_seconds))
        if is_time:
            self._due_at_seconds = now + self._interval_seconds
        return is_time

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """See `Schedule`."""
        if not trainer.sanity_checking:
            self._schedule.at_validation_start(metrics=trainer.callback_metrics)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Save by validations, and make the save that has waited for this one."""
        if trainer.sanity_checking or trainer.state.fn != "fit":
            return
        step, metrics = trainer.global_step, trainer.callback_metrics
        if self._schedule.at_validation_end(step=step, is_last_batch=trainer.is_last_batch, metrics=metrics):
            self._save(trainer)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Save by epochs, and the last step with `save_last`."""
        epoch, step, metrics = trainer.current_epoch, trainer.global_step, trainer.callback_metrics
        validates = trainer.enable_validation
        is_due = self._schedule.at_epoch_end(epoch=epoch, step=step, metrics=metrics, validates=validates)
        # Not in on_train_end: the loops count the epoch as over by then, and a resume would leave out its rest.
        is_missed = self._saves_last and self._schedule.saved_step != step and is_last_epoch(trainer)
        if is_due or is_missed:
            self._save(trainer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Wait for the save in flight, and with a fast tier for the newest checkpoint to come into the store."""
        if self._schedule.due_step is not None:
            logger.warning(
                "the save of step %d was not made: %s was not logged since", self._schedule.due_step, self._monitor
            )
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()
        if not trainer.fast_dev_run:
            self._lazy_store.settle()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Save with `save_on_exception`; then see `LazyStore.abandon`. Raises nothing: the exception says more.

        A `ckpt_path` that is not there, as in a pointer of Ray's, gets a note.
        """
        is_new = self._schedule.saved_step != trainer.global_step
        if self._saves_on_exception and trainer.state.fn == "fit" and is_new and not trainer.sanity_checking:
            count_interrupted_batch(trainer)
            try:
                self._save(trainer)
                pending, self._pending = self._pending, None
                if pending is not None:
                    pending.result()
            except CkptstoreError as error:
                logger.warning("step %d could not be saved after the exception: %s", trainer.global_step, error)
        if isinstance(exception, FileNotFoundError) and trainer.ckpt_path and self._resume:
            exception.add_note("CheckpointStoreCallback resumes from its store by itself: call fit without ckpt_path")
        self._lazy_store.abandon(exception)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Close the store if this callback opened it."""
        if stage == "fit":
            self._lazy_store.close()

    def _save(self, trainer: Any) -> None:
        if trainer.fast_dev_run:
            return
        step, only = trainer.global_step, self.weights_only
        metrics, epoch = metrics_of(trainer), trainer.current_epoch
        if self._monitor is not None and not self._schedule.is_known(step, metrics):
            metrics.pop(self._monitor, None)  # of older weights: a save that waits for none, at the end or an exception
        if reports_to_ray(self.store):
            metrics |= {"epoch": epoch, "step": step}  # as Ray's own callback has it
        options = {"metrics": metrics, "metadata": {"epoch": epoch}, **self._save_options}
        if self._as_file:
            with _written_by_lightning(trainer, weights_only=only) as directory:
                self.store.save_directory(step, directory, **options)
        elif self._asynchronous:
            self._pending = self.store.save_async(step, state_of(trainer, weights_only=only), **options)
            if self._pending.skipped:
                return
        else:
            self.store.save(step, state_of(trainer, weights_only=only), **options)
        self._schedule.saved(step=step)


@contextmanager
def _written_by_lightning(trainer: Any, *, weights_only: bool) -> Iterator[str | None]:
    """Have Lightning write its file into a new directory on each node, and yield that for one process of each node."""
    made = tempfile.mkdtemp(prefix="ckptstore-lightning-") if trainer.is_global_zero else None
    # Rank 0's path: under FSDP all ranks write there, whatever path they were given.
    directory = Path(trainer.strategy.broadcast(made))
    directory.mkdir(exist_ok=True)
    is_first = trainer.local_rank == 0
    try:
        trainer.save_checkpoint(directory / CHECKPOINT_NAME, weights_only=weights_only)
        yield str(directory) if is_first and any(directory.iterdir()) else None
    finally:
        if is_first:
            shutil.rmtree(directory, ignore_errors=True)


def _check_keywords(keywords: Mapping[str, Any]) -> None:
    """Raise InvalidInput for a keyword that `open_store` does not have, before anything is trained."""
    known = [name for name in inspect.signature(open_store).parameters if name != "uri"]
    for name in keywords:
        if name not in known:
            mine = [*known, *inspect.signature(CheckpointStoreCallback).parameters]
            raise InvalidInput(
                f"{name} is no keyword of CheckpointStoreCallback or open_store{meant(nearest(name, mine))}",
                hint=_OF_MODEL_CHECKPOINT.get(name),
            )
