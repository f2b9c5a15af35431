"""PPO of stable-baselines3 with its own CheckpointCallback: `rl_model_49_steps.zip`. A step here is a rollout of 16
steps of the environment and the update with it.

A checkpoint has neither the rollout under way nor a generator, and a program that loads it begins a rollout anew. That
is the same one because each begins with an episode and a seed of its own. At the end of the third rollout, where
`save_freq=3 * 16` saves, the third update is still to come: so it is saved at the first step of the fourth.
"""

from __future__ import annotations

import time
from typing import Any

import gymnasium
import numpy
import torch
from progress import LAST_STEP, SAVE_EVERY_STEPS, Progress, arguments
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback, CheckpointCallback
from stable_baselines3.common.utils import set_random_seed

torch.set_num_threads(1)
ROLLOUT_STEPS, EPOCHS = 16, 2


class Point(gymnasium.Env[Any, Any]):
    """A point on a line that is to be kept near 0, for as many steps as a rollout has."""

    observation_space = gymnasium.spaces.Box(-100, 100, (1,))
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.place, self.steps = 3.0, 0
        return numpy.array([self.place], "float32"), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.place, self.steps = self.place + (1.0 if action else -1.0), self.steps + 1
        return numpy.array([self.place], "float32"), -abs(self.place), self.steps == ROLLOUT_STEPS, False, {}


class Tell(BaseCallback):
    """Tells the loss of each rollout when the next one begins, and gives that one its seed."""

    def __init__(self, progress: Progress, step_seconds: float) -> None:
        super().__init__()
        self.progress, self.step_seconds = progress, step_seconds

    def _on_rollout_start(self) -> None:
        set_random_seed(rollouts_of(self.model))
        if "train/loss" in self.logger.name_to_value:
            time.sleep(self.step_seconds)
            self.progress.told(rollouts_of(self.model), self.logger.name_to_value["train/loss"])

    _on_training_end = _on_rollout_start

    def _on_step(self) -> bool:
        return True


def rollouts_of(model: Any) -> int:
    return model._n_updates // EPOCHS


def main() -> None:
    given = arguments()
    saved = sorted(given.folder.glob("rl_model_*_steps.zip"), key=lambda path: int(path.name.split("_")[2]))
    set_random_seed(0)
    model = (
        PPO.load(saved[-1], env=Point(), device="cpu")
        if saved
        else PPO("MlpPolicy", Point(), n_steps=ROLLOUT_STEPS, batch_size=8, n_epochs=EPOCHS, device="cpu")
    )
    tell = Tell(Progress(given.losses, given.pause_at), given.step_seconds)
    saves = CheckpointCallback(save_freq=SAVE_EVERY_STEPS * ROLLOUT_STEPS + 1, save_path=str(given.folder))
    left = (LAST_STEP - rollouts_of(model)) * ROLLOUT_STEPS
    model.learn(left, callback=[tell, saves], log_interval=None, reset_num_timesteps=not saved)


if __name__ == "__main__":
    main()
