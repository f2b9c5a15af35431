"""What the train scripts share: a line for each step with its exact loss, and the step at which a run stands still."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

LAST_STEP = 12
SAVE_EVERY_STEPS = 3


class Progress:
    """Writes the losses. At `pause_at` it stands still, so that a test can end the job at a known place."""

    def __init__(self, losses: Path, pause_at: int | None = None) -> None:
        self._losses, self._pause_at = losses, pause_at

    def told(self, step: int, loss: float) -> None:
        """A step is done; its checkpoint, if it has one, need not be."""
        with self._losses.open("a") as file:
            file.write(json.dumps([step, float(loss).hex()]) + "\n")
        if step == self._pause_at:
            time.sleep(600)


def arguments() -> argparse.Namespace:
    """`SCRIPT FOLDER LOSSES [--pause-at STEP] [--mode MODE] [--step-seconds SECONDS]`, the same for every script."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("losses", type=Path)
    parser.add_argument("--pause-at", type=int)
    parser.add_argument("--mode", default="")
    parser.add_argument("--step-seconds", type=float, default=0.0)
    return parser.parse_args()
