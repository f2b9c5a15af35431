"""The parts of a Lightning Trainer as a state: its own live objects, so that nothing is gathered or copied.

The keys follow the wrapped objects' own names, which DDP and sharding leave as they are: a state saved under one
strategy is loaded under another. Only public names of Lightning are used, but for
`leave_finished_pass` and `leave_older_file`.
"""

from __future__ import annotations

import copy
import inspect
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ckptstore.errors import InvalidInput, InvalidState
from ckptstore.state.live.run_state import RandomNumbers

logger = logging.getLogger("ckptstore.lightning")

_REQUEUED = re.compile(r"hpc_ckpt_\d+\.ckpt")
_KNOWN = ("SingleDeviceStrategy", "DDPStrategy", "FSDPStrategy", "ModelParallelStrategy")
_REFUSED = ("DeepSpeedStrategy", "XLAStrategy", "SingleDeviceXLAStrategy", "XLAFSDPStrategy")


def check_strategy(strategy: Any) -> None:
    """Raise InvalidInput for a strategy whose model and optimizers are not plain torch objects on each rank."""
    names = [cls.__name__ for cls in type(strategy).__mro__]
    found = next((name for name in names if name in (*_KNOWN, *_REFUSED)), None)
    if found not in _KNOWN:
        raise InvalidInput(
            f"{names[0]} keeps model and optimizer in a form of its own, which is not saved here",
            hint=f"Use one of {', '.join(_KNOWN)}",
        )


def state_of(trainer: Any, *, weights_only: bool = False) -> dict[str, Any]:
    """Return everything that a Trainer needs to go on, for `store.save` and `store.resume`; or the model alone."""
    if weights_only:
        return {"model": trainer.model}
    return {
        "model": trainer.model,
        "optimizers": list(trainer.optimizers),
        "schedulers": [config.scheduler for config in trainer.lr_scheduler_configs],
        "datamodule": MaybeMissing(trainer.datamodule),
        "hooks": Hooks(trainer),
        "callbacks": Callbacks(trainer),
        "precision": MaybeMissing(trainer.precision_plugin),
        "loops": trainer.fit_loop,
        "rng": Numbers(trainer.model),
    }


def leave_finished_epoch(trainer: Any) -> bool:
    """Begin the next epoch in a fit that was resumed from the end of one, and return True then.

    With `max_steps` and no `max_epochs`, Lightning would continue the finished epoch, and train its first batch once
    more (2.6.6, with its own checkpoints of the ends of epochs too). A fit that `max_steps` ended in the middle of an
    epoch calls that the end as well, and goes on with it.
    """
    loop = trainer.fit_loop
    epochs, has_ended = loop.epoch_progress.total, loop.epoch_loop.batch_progress.is_last_batch
    if has_ended and loop.restarting and epochs.ready == epochs.started == epochs.processed == epochs.completed + 1:
        loop.epoch_progress.increment_completed()
        loop.epoch_loop.restarting = False
        return True
    return False


def leave_finished_pass(trainer: Any) -> None:
    """Have Lightning begin a new pass over the loaders in the epoch after that of `leave_finished_epoch`.

    A loader with a length has a state of the end of its pass, which Lightning would take for the whole next epoch. One
    without has ended its pass itself, when Lightning asked it for one batch more.
    """
    if trainer.num_training_batches != float("inf"):
        # There is no public way; a release may lack this name.
        setattr(trainer.fit_loop, "_resuming_from_checkpoint", False)  # noqa: B010 - a private name


def recount_batches(trainer: Any) -> None:
    """Count the batches of an epoch that was resumed in its middle by this number of ranks, where the one that saved
    has counted its own: Lightning would end the epoch by that count, too early or without the validation of its end.

    For a `MapLoader`; no other loader goes on with another number of ranks.
    """
    loader, loop = trainer.train_dataloader, trainer.fit_loop.epoch_loop
    if not loop.restarting or not callable(getattr(loader, "batches_left", None)):
        return
    current = loop.batch_progress.current
    more = len(loader) - loader.batches_left() - current.ready
    for name in ("ready", "started", "processed", "completed"):
        setattr(current, name, getattr(current, name) + more)


def count_interrupted_batch(trainer: Any) -> None:
    """Count the batch in which an exception ended the training, as the position of a loader that has one counts it.

    Lightning counts it as not begun. On a resume it would wait for one batch more than such a loader gives, and leave
    out the validation of the end of the epoch.
    """
    progress, loaders = trainer.fit_loop.epoch_loop.batch_progress, _loaders_in(trainer.train_dataloader)
    if progress.current.processed == progress.current.ready or not any(hasattr(item, "state_dict") for item in loaders):
        return
    for count in (progress.total, progress.current):
        count.started = count.processed = count.completed = count.ready
    logger.warning(
        "a resume leaves out the batch in which the training was interrupted, after step %d", trainer.global_step
    )


def _loaders_in(loaders: Any) -> list[Any]:
    """Return the loaders of a Trainer, which may be in dicts and lists."""
    items = [*loaders.values()] if isinstance(loaders, Mapping) else loaders
    if not isinstance(items, list | tuple):
        return [items]
    return [one for item in items for one in _loaders_in(item)]


def warn_of_prefetching(trainer: Any) -> None:
    """Warn of loaders whose position Lightning saves too far on: it fetches a batch ahead where there is no length."""
    if trainer.num_training_batches != float("inf") or not trainer.is_global_zero:
        return
    takes_iterator = "dataloader_iter" in inspect.signature(trainer.lightning_module.training_step).parameters
    ahead = [type(item).__name__ for item in _loaders_in(trainer.train_dataloader) if hasattr(item, "state_dict")]
    if ahead and not takes_iterator:
        logger.warning(
            "Lightning fetches a batch ahead from a loader without a length, so who resumes in the middle of an epoch "
            "leaves out one batch of %s: use a loader with a length, or save with every_n_epochs alone",
            ", ".join(ahead),
        )


def warn_of_plateaus(trainer: Any) -> None:
    """Warn, after a resume, of schedulers that Lightning leaves out at the end of one epoch."""
    configs = [config for config in trainer.lr_scheduler_configs if config.interval == "epoch"]
    if any(config.reduce_on_plateau for config in configs) and trainer.is_global_zero:
        logger.warning(
            "Lightning does not step ReduceLROnPlateau at the end of the epoch that a training resumes in, nor for the "
            "one that has ended with the checkpoint: the learning rate may fall an epoch later"
        )


def found_requeued(trainer: Any) -> bool:
    """Return True if Lightning has found a file by itself, which it wrote when Slurm was about to requeue the job."""
    return bool(trainer.ckpt_path) and _REQUEUED.fullmatch(str(trainer.ckpt_path).rpartition("/")[2]) is not None


def leave_older_file(trainer: Any, step: int) -> bool:
    """Leave out a file that Lightning has found by itself if it is older than the checkpoint of `step` in the store.

    Returns True then. Nothing removes the file: Lightning would take it at each later start, too.

    FSDP and ModelParallel read the file later, and cannot be kept from it: a warning says so, and for a release of
    Lightning that holds what it has read under another name.
    """
    connector = getattr(trainer, "_checkpoint_connector", None)  # there is no public way; a release may lack this one
    their_step = getattr(connector, "_loaded_checkpoint", {}).get("global_step")
    if their_step is None:
        logger.warning(
            "Lightning goes on from %s, which it has found, though the store has step %d: remove the file if that is "
            "later",
            trainer.ckpt_path,
            step,
        )
    if their_step is None or their_step >= step:
        return False
    logger.warning(
        "%s, which Lightning has found, is of step %d: going on from step %d in the store",
        trainer.ckpt_path,
        their_step,
        step,
    )
    setattr(connector, "_loaded_checkpoint", {})  # noqa: B010 - a private name
    trainer.ckpt_path = None
    return True


def is_last_epoch(trainer: Any) -> bool:
    """Return True at the end of an epoch after which the fit may end: by a limit, or because something has asked it to
    stop."""
    has_steps = trainer.max_steps != -1 and trainer.global_step >= trainer.max_steps
    has_epochs = trainer.max_epochs not in (None, -1) and trainer.current_epoch + 1 >= trainer.max_epochs
    return bool(trainer.should_stop or has_steps or has_epochs)


def metrics_of(trainer: Any) -> dict[str, float]:
    """Return the logged metrics that are single numbers."""
    found = {}
    for name, value in trainer.callback_metrics.items():
        if getattr(value, "numel", lambda: 1)() == 1:
            found[name] = float(value)
    return found


class MaybeMissing:
    """Wraps an object that may be missing; a state that is empty is not loaded."""

    def __init__(self, item: Any) -> None:
        self._item = item

    def state_dict(self) -> dict[str, Any]:
        """Return the object's state."""
        return {} if self._item is None else dict(self._item.state_dict())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the object's state."""
        if state and self._item is not None:
            self._item.load_state_dict(dict(state))


class Numbers:
    """The random numbers of this rank, which Lightning's own file does not have."""

    def __init__(self, model: Any) -> None:
        self._numbers = RandomNumbers([model])
        self._saved: Mapping[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the generators."""
        return self._numbers.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the generators."""
        self._saved = state
        self._numbers.load_state_dict(state)

    def load_rank_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Leave the generators as they are: the numbers of other ranks would be the same on several."""
        logger.warning("%d ranks have saved: the random numbers of dropout and shuffling begin anew", len(states))

    def set_again(self) -> None:
        """Set the generators once more, after Lightning has drawn for a loader that has its position already."""
        if self._saved is not None:
            self._numbers.load_state_dict(self._saved)


class Callbacks:
    """The states of a Trainer's callbacks, by the key that each gives itself."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        """Return the states that are not empty."""
        states = {callback.state_key: callback.state_dict() for callback in self._trainer.callbacks}
        return {key: state for key, state in states.items() if state}

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        """Restore the states; callbacks without a saved state, and states without a callback, are left out."""
        own = {callback.state_key: callback for callback in self._trainer.callbacks}
        for key, state in states.items():
            if key in own:
                own[key].load_state_dict(copy.deepcopy(state))
            else:
                logger.warning("no callback takes the state that was saved for %s", key)


class Hooks:
    """The entries that `on_save_checkpoint` of the LightningModule and of callbacks add to a checkpoint.

    The hooks get a dict with epoch and step, and without the model, so they cannot change how it is saved.
    `on_load_checkpoint` gets the same dict back, once model and optimizers are loaded.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        """Call the hooks. Raises InvalidState when one reads a key that is not in the dict."""
        trainer, module = self._trainer, self._trainer.lightning_module
        contents = _Contents(epoch=trainer.current_epoch, global_step=trainer.global_step)
        for callback in trainer.callbacks:
            callback.on_save_checkpoint(trainer, module, contents)
        module.on_save_checkpoint(contents)
        return dict(contents)

    def load_state_dict(self, contents: Mapping[str, Any]) -> None:
        """Call the hooks for loading, in Lightning's order."""
        trainer, module = self._trainer, self._trainer.lightning_module
        contents_copy = _Contents(copy.deepcopy(dict(contents)))
        module.on_load_checkpoint(contents_copy)
        for callback in trainer.callbacks:
            callback.on_load_checkpoint(trainer, module, contents_copy)


class _Contents(dict[str, Any]):
    """The dict that hooks write to."""

    def __missing__(self, key: str) -> Any:
        raise InvalidState(
            f"on_save_checkpoint or on_load_checkpoint asked for {key!r}, which is not in the dict that it gets",
            hint="Tensors are saved by each rank from where they are; a hook may add entries, and read its own",
        )
