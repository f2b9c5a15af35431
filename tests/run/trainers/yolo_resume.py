"""YOLO of ultralytics: `weights/last.pt`, which each epoch overwrites, and `best.pt`. A run goes on with `resume=True`.

What it goes on from is the average of the weights in half precision: its losses are not those of a run that was never
ended, whoever copies the files. What can hold is that the same `last.pt` gives the same losses. So this goes on from
it after each epoch, and the run that nobody kills does that too. The last epoch is not saved: YOLO evaluates before
that, with an operator of torchvision that is not there.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import cv2
import numpy
import torch
import without_operators  # noqa: F401  # before ultralytics, which asks torchvision for its version

os.environ["YOLO_CONFIG_DIR"] = f"{sys.argv[2]}.settings"  # not the home directory
# isort: split
from progress import LAST_STEP, SAVE_EVERY_STEPS, Progress, arguments
from ultralytics import YOLO

torch.set_num_threads(1)


class EpochHasEnded(Exception):
    """Ends a run as a kill would."""


def dataset(folder: Path) -> Path:
    """Write two images a step with a box each, and what names them."""
    for name in ("images", "labels"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    images = numpy.random.default_rng(1).integers(0, 255, (2 * SAVE_EVERY_STEPS, 32, 32, 3), dtype=numpy.uint8)
    for number, image in enumerate(images):
        cv2.imwrite(str(folder / f"images/{number}.png"), image)
        (folder / f"labels/{number}.txt").write_text("0 0.5 0.5 0.4 0.4\n")
    (described := folder / "data.yaml").write_text(f"path: {folder}\ntrain: images\nval: images\nnames: [thing]\n")
    return described


def main() -> None:
    given = arguments()
    progress, data = Progress(given.losses, given.pause_at), dataset(given.losses.with_suffix(".data"))
    last, step = given.folder / "weights/last.pt", {"now": 0}
    first: dict[str, Any] = {"pretrained": False, "imgsz": 32, "batch": 2, "workers": 0, "device": "cpu", "amp": False}
    first |= {"val": False, "plots": False, "optimizer": "AdamW", "nbs": 2, "mosaic": 0.0, "exist_ok": True}
    first |= {"project": str(given.folder.parent), "name": given.folder.name}

    def seed(trainer: Any) -> None:
        step["now"] = trainer.epoch * SAVE_EVERY_STEPS
        torch.manual_seed(trainer.epoch)

    def tell(trainer: Any) -> None:
        step["now"] += 1
        time.sleep(given.step_seconds)
        progress.told(step["now"], trainer.loss.item())
        if step["now"] == LAST_STEP:
            raise EpochHasEnded

    def end(trainer: Any) -> None:
        raise EpochHasEnded

    while step["now"] < LAST_STEP:
        model = YOLO(str(last) if last.exists() else "yolo11n.yaml")
        model.add_callback("on_train_epoch_start", seed)
        model.add_callback("on_train_batch_end", tell)
        model.add_callback("on_model_save", end)
        more = {"resume": True} if last.exists() else first
        with suppress(EpochHasEnded):
            model.train(data=str(data), epochs=LAST_STEP // SAVE_EVERY_STEPS, **more)


if __name__ == "__main__":
    main()
