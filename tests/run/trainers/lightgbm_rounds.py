"""LightGBM from Python. It writes no snapshots there: `snapshot_freq` is for its command line program, which its wheel
does not have. So a callback saves the Booster, under the names of that program: `model.txt.snapshot_iter_6`.

The generators for samples of rows and columns are in no file and cannot be seeded between rounds, so none are drawn.
"""

from __future__ import annotations

import time

import lightgbm
import numpy
from lightgbm.callback import CallbackEnv
from progress import LAST_STEP, SAVE_EVERY_STEPS, Progress, arguments


def main() -> None:
    given = arguments()
    given.folder.mkdir(parents=True, exist_ok=True)
    progress = Progress(given.losses, given.pause_at)

    def tell_and_save(env: CallbackEnv) -> None:
        step = env.iteration + 1
        time.sleep(given.step_seconds)
        progress.told(step, env.evaluation_result_list[0][2])
        if step % SAVE_EVERY_STEPS == 0:
            env.model.save_model(given.folder / f"model.txt.snapshot_iter_{step}")

    saved = {int(path.name.rpartition("_")[2]): path for path in given.folder.glob("model.txt.snapshot_iter_*")}
    done = max(saved, default=0)
    numbers = numpy.random.default_rng(0)
    inputs = numbers.normal(size=(200, 5))
    options = {"objective": "regression", "min_data_in_leaf": 5, "num_leaves": 7, "verbose": -1, "num_threads": 1}
    rows = lightgbm.Dataset(inputs, inputs.sum(axis=1), free_raw_data=False)
    lightgbm.train(
        options,
        rows,
        num_boost_round=LAST_STEP - done,
        valid_sets=[rows],
        init_model=saved.get(done),
        callbacks=[tell_and_save],
    )


if __name__ == "__main__":
    main()
