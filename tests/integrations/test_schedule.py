"""When a Lightning checkpoint is due: by steps, by epochs, with and without a metric to wait for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import ckptstore
from ckptstore.errors import InvalidInput
from ckptstore.integrations.lightning.schedule import Schedule

PACKAGE = Path(ckptstore.__file__).parent / "integrations/lightning"


def saved(schedule: Schedule, *, epochs: int, batches: int, validate_every: int, metric: str = "val_loss") -> list[int]:
    """The steps that are saved in a run that validates after so many batches, and at which hook of an epoch's end."""
    found: list[int] = []
    metrics: set[str] = set()

    def note(is_due: bool, step: int) -> None:
        if is_due:
            found.append(step)
            schedule.saved(step=step)

    for epoch in range(epochs):
        for batch in range(1, batches + 1):
            step, is_last = epoch * batches + batch, batch == batches
            note(schedule.at_batch_end(step=step, is_last_batch=is_last, metrics=metrics), step)
            if batch % validate_every == 0:
                schedule.at_validation_start(metrics=metrics)
                metrics.add(metric)
                note(schedule.at_validation_end(step=step, is_last_batch=is_last, metrics=metrics), step)
        note(schedule.at_epoch_end(epoch=epoch, step=(epoch + 1) * batches, metrics=metrics), step)
    return found


@pytest.mark.parametrize(
    ("steps", "epochs", "monitor", "expected"),
    [
        (None, None, None, [2, 4, 5, 7, 9, 10, 12, 14, 15, 17, 19, 20]),
        (None, 2, None, [10, 20]),
        (3, None, None, [3, 6, 9, 12, 15, 18]),
        (None, 1, None, [5, 10, 15, 20]),
        (5, 1, None, [5, 10, 15, 20]),
        (3, 2, None, [3, 6, 9, 10, 12, 15, 18, 20]),
        (3, None, "val_loss", [4, 7, 9, 12, 17, 19]),
        (None, 1, "val_loss", [7, 12, 17]),
        (None, None, "val_loss", [2, 4, 7, 9, 12, 14, 17, 19]),
    ],
)
def test_saves(steps: int | None, epochs: int | None, monitor: str | None, expected: list[int]) -> None:
    """Batches 2 and 4 of each epoch of 5 are followed by a validation."""
    schedule = Schedule(every_n_train_steps=steps, every_n_epochs=epochs, monitor=monitor)
    assert saved(schedule, epochs=4, batches=5, validate_every=2) == expected


@pytest.mark.parametrize(("steps", "epochs", "seen"), [(3, None, 4), (None, 1, 5), (7, None, 9)])
def test_a_metric_that_no_validation_gives_is_refused(steps: int | None, epochs: int | None, seen: int) -> None:
    """At the first save that is due and has seen a validation: of the step before it, or at the next one."""
    schedule = Schedule(every_n_train_steps=steps, every_n_epochs=epochs, monitor="valloss")
    with pytest.raises(InvalidInput, match=r"did you mean 'val_loss'\? There are val_loss") as caught:
        saved(schedule, epochs=4, batches=5, validate_every=2)
    assert caught.value.step <= seen


def test_a_metric_of_training_is_missed_where_nothing_is_validated() -> None:
    schedule = Schedule(every_n_train_steps=None, every_n_epochs=2, monitor="los")
    assert not schedule.at_epoch_end(epoch=0, step=5, metrics={"loss"}, validates=False)
    with pytest.raises(InvalidInput, match="did you mean 'loss'"):
        schedule.at_epoch_end(epoch=1, step=10, metrics={"loss"}, validates=False)


def test_a_validation_that_is_still_to_come_is_waited_for() -> None:
    schedule = Schedule(every_n_train_steps=None, every_n_epochs=1, monitor="val_loss")
    assert not schedule.at_epoch_end(epoch=0, step=5, metrics={"loss"})
    schedule.at_validation_start(metrics={"loss"})
    assert not schedule.at_validation_end(step=10, is_last_batch=True, metrics={"loss", "val_loss"})
    assert schedule.at_epoch_end(epoch=1, step=10, metrics={"loss", "val_loss"})


def test_a_metric_of_training_is_not_waited_for() -> None:
    schedule = Schedule(every_n_train_steps=2, every_n_epochs=None, monitor="train_loss")
    assert schedule.at_batch_end(step=2, is_last_batch=False, metrics={"train_loss"})
    schedule.saved(step=2)
    schedule.at_validation_start(metrics={"train_loss"})
    assert not schedule.at_validation_end(step=3, is_last_batch=False, metrics={"train_loss", "val_loss"})
    assert schedule.at_batch_end(step=4, is_last_batch=False, metrics={"train_loss", "val_loss"})


def test_a_step_that_is_stored_is_not_saved_again() -> None:
    schedule = Schedule(every_n_train_steps=2, every_n_epochs=None, monitor=None)
    schedule.restart(step=4)
    assert not schedule.at_batch_end(step=4, is_last_batch=False, metrics=())
    assert schedule.at_batch_end(step=6, is_last_batch=False, metrics=())


def test_a_batch_that_steps_several_optimizers_passes_no_save_by() -> None:
    schedule = Schedule(every_n_train_steps=4, every_n_epochs=None, monitor=None)
    schedule.restart(step=3)
    due = [step for step in (5, 6, 7, 7, 9, 13) if schedule.at_batch_end(step=step, is_last_batch=False, metrics=())]
    assert due == [5, 9, 13]


@pytest.mark.parametrize("name", ["every_n_train_steps", "every_n_epochs"])
def test_a_period_below_one_is_refused(name: str) -> None:
    asked: dict[str, int | None] = {"every_n_train_steps": None, "every_n_epochs": None, name: 0}
    with pytest.raises(InvalidInput, match=f"{name} is 0"):
        Schedule(monitor=None, **asked)


def test_no_private_name_of_lightning_is_used() -> None:
    """So that no release of Lightning has to be tried before it may be used."""
    private = re.compile(r"\b(?:trainer|strategy|fit_loop|pl_module|module|callback|plugin)\._[a-z]\w*")
    assert [found for path in PACKAGE.glob("*.py") for found in private.findall(path.read_text())] == []
