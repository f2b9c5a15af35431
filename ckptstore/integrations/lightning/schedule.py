"""Decide when a Lightning Trainer's checkpoints are due, and if the metric that ranks them belongs to the weights."""

from __future__ import annotations

from collections.abc import Collection

from ckptstore.errors import InvalidInput
from ckptstore.runtime.near import meant, nearest, shown


class Schedule:
    """Saves every so many optimizer steps, every so many epochs, after so much time, or at several of these; no step
    twice. When none is given it saves at the end of each epoch and of each validation within one, which is what
    Lightning's ModelCheckpoint saves and more.

    With `monitor` a save waits until that metric exists and belongs to the present step. A metric that only a
    validation logs belongs to the step of that validation, so a save that is due between two of them is made at the end
    of the next. When that one does not log it either, InvalidInput names the existing metrics, as Lightning's
    ModelCheckpoint does. All ranks log the same names, so all decide the same.

    A save that is due with the last batch of an epoch is made at the end of that epoch: Lightning, resuming from a
    place in between, leaves out the rest of the epoch's end, such as its validation and the hooks of other callbacks.
    """

    def __init__(
        self,
        *,
        every_n_train_steps: int | None,
        every_n_epochs: int | None,
        monitor: str | None,
        is_timed: bool = False,
    ) -> None:
        for name, value in (("every_n_train_steps", every_n_train_steps), ("every_n_epochs", every_n_epochs)):
            if value is not None and value < 1:
                raise InvalidInput(f"{name} is {value!r}, it must be at least 1")
        self._steps = every_n_train_steps
        self._each_validation = every_n_train_steps is None and every_n_epochs is None and not is_timed
        self._epochs = 1 if self._each_validation else every_n_epochs
        self._monitor = monitor
        self.restart(step=0)

    def restart(self, *, step: int) -> None:
        """Begin at a step that is stored already, or for which nothing has been trained."""
        self.saved_step = self._seen_step = step
        self.due_step: int | None = None
        """The step of the save that waits for its metric."""
        self._validated_step: int | None = None
        self._must_exist = False
        self._existed = False
        self._is_of_validation = False

    def saved(self, *, step: int) -> None:
        """Note a save."""
        self.saved_step = step
        self.due_step = None

    def at_batch_end(self, *, step: int, is_last_batch: bool, metrics: Collection[str], is_time: bool = False) -> bool:
        """True to save after a batch. The step does not move while gradients are accumulated, and moves by several
        where a batch steps several optimizers."""
        is_due = is_time or (self._steps is not None and step // self._steps > self._seen_step // self._steps)
        self._seen_step = step
        return self._now(is_due, step, metrics, wait=is_last_batch)

    def at_epoch_end(self, *, epoch: int, step: int, metrics: Collection[str], validates: bool = True) -> bool:
        """True to save at the end of an epoch, counted from 0; `validates` is True if a validation may follow."""
        is_due = self._epochs is not None and (epoch + 1) % self._epochs == 0
        self._must_exist = self._must_exist or not validates
        return self._now(is_due or self.due_step is not None, step, metrics)

    def at_validation_start(self, *, metrics: Collection[str]) -> None:
        """Note if the metric existed before a validation."""
        self._existed = self._monitor in metrics

    def at_validation_end(self, *, step: int, is_last_batch: bool, metrics: Collection[str]) -> bool:
        """True to save after a validation: one that is due, or one that has waited for its metric."""
        if not self._existed and self._monitor in metrics:
            self._is_of_validation = True
        self._validated_step = step
        self._must_exist = True
        return self._now(self._each_validation or self.due_step is not None, step, metrics, wait=is_last_batch)

    def _now(self, is_due: bool, step: int, metrics: Collection[str], *, wait: bool = False) -> bool:
        if not is_due or step == self.saved_step:
            return False
        if not wait and (self._monitor is None or self.is_known(step, metrics)):
            return True
        if not wait and self._must_exist and self._monitor is not None and self._monitor not in metrics:
            raise InvalidInput(
                f"monitor={self._monitor!r} was not logged{meant(nearest(self._monitor, metrics))} "
                f"There are {shown(metrics)}",
                step=step,
                hint="Log it in validation_step or training_step of the LightningModule",
            )
        self.due_step = step
        return False

    def is_known(self, step: int, metrics: Collection[str]) -> bool:
        """True if the monitored metric exists, and is not that of an earlier validation."""
        return self._monitor in metrics and (not self._is_of_validation or self._validated_step == step)
