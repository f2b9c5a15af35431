"""XGBoost with its TrainingCheckPoint: a step is a round of boosting, `model_2.ubj` has the first three.

It counts rounds from its start: with an interval of 2 it saves after the third one, and then after each second one. The
first save of each start has thus three rounds more than the start before it had kept. The generator for samples of rows
and columns is in no file, and what a process draws first differs from what it draws later: so none are drawn.
"""

from __future__ import annotations

import time

import numpy
import xgboost
from progress import LAST_STEP, Progress, arguments


class Tell(xgboost.callback.TrainingCallback):
    """Tells the loss of each round, before TrainingCheckPoint saves it."""

    def __init__(self, progress: Progress, step_seconds: float) -> None:
        super().__init__()
        self.progress, self.step_seconds = progress, step_seconds

    def after_iteration(self, model: xgboost.Booster, epoch: int, evals_log: dict[str, dict[str, list[float]]]) -> bool:
        time.sleep(self.step_seconds)
        self.progress.told(model.num_boosted_rounds(), evals_log["train"]["rmse"][-1])
        return False


def main() -> None:
    given = arguments()
    given.folder.mkdir(parents=True, exist_ok=True)
    saved = {int(path.stem.rpartition("_")[2]) + 1: path for path in given.folder.glob("model_*.ubj")}
    done = max(saved, default=0)
    numbers = numpy.random.default_rng(0)
    inputs = numbers.normal(size=(200, 5))
    rows = xgboost.DMatrix(inputs, inputs.sum(axis=1))
    xgboost.train(
        {"max_depth": 3, "nthread": 1},
        rows,
        num_boost_round=LAST_STEP - done,
        evals=[(rows, "train")],
        verbose_eval=False,
        xgb_model=saved.get(done),
        callbacks=[
            Tell(Progress(given.losses, given.pause_at), given.step_seconds),
            xgboost.callback.TrainingCheckPoint(given.folder, interval=2),
        ],
    )


if __name__ == "__main__":
    main()
