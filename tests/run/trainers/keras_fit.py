"""Keras on torch with its own callbacks: ModelCheckpoint with the epoch and the loss in the name, and another one of
the best; or BackupAndRestore (`--mode backup`), whose `latest.weights.h5` and `training_metadata.json` are written anew
in each epoch.

Neither has torch's generator in it, of which Keras takes its dropout: that of a step depends on its number alone.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import keras
import numpy
import torch
from progress import LAST_STEP, SAVE_EVERY_STEPS, Progress, arguments

torch.set_num_threads(1)
LAST_EPOCH = LAST_STEP // SAVE_EVERY_STEPS


class Tell(keras.callbacks.Callback):
    """Tells the mean loss of the epoch after each of its batches, and sets the generator before it."""

    def __init__(self, progress: Progress, step_seconds: float) -> None:
        super().__init__()
        self.progress, self.step_seconds, self.epoch = progress, step_seconds, 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        torch.manual_seed(self.epoch * SAVE_EVERY_STEPS + batch)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        time.sleep(self.step_seconds)
        self.progress.told(self.epoch * SAVE_EVERY_STEPS + batch + 1, logs["loss"])


def new_model() -> Any:
    keras.utils.set_random_seed(3)
    layers = [keras.Input((8,)), keras.layers.Dense(16), keras.layers.Dropout(0.2), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile(optimizer=keras.optimizers.Adam(1e-2), loss="mse")
    return model


def epoch_of(path: Path) -> int:
    """`weights.03-1.25.keras` is that of epoch 3."""
    return int(path.name.split(".")[1].split("-")[0])


def main() -> None:
    given = arguments()
    inputs = numpy.random.default_rng(1).standard_normal((4 * SAVE_EVERY_STEPS, 8), dtype="float32")
    saved = sorted(given.folder.glob("weights.*.keras"), key=epoch_of)
    model = keras.models.load_model(saved[-1]) if saved else new_model()
    name = given.folder / "weights.{epoch:02d}-{loss:.2f}.keras"
    best = keras.callbacks.ModelCheckpoint(given.folder / "best.keras", monitor="loss", save_best_only=True)
    backup = keras.callbacks.BackupAndRestore(given.folder)
    savers = [backup] if given.mode == "backup" else [keras.callbacks.ModelCheckpoint(name), best]
    model.fit(
        inputs,
        inputs.sum(1, keepdims=True),
        batch_size=4,
        shuffle=False,
        initial_epoch=epoch_of(saved[-1]) if saved else 0,
        epochs=LAST_EPOCH,
        verbose=0,
        callbacks=[Tell(Progress(given.losses, given.pause_at), given.step_seconds), *savers],
    )


if __name__ == "__main__":
    main()
