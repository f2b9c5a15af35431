"""mmengine's Runner with its CheckpointHook: `epoch_N.pth`, and `last_checkpoint` with the path of the newest."""
# ruff: noqa: E402

from __future__ import annotations

import sys
import time
import warnings
from typing import Any

sys.modules["transformers"] = None  # type: ignore[assignment]  # mmengine would import it for one optimizer
import torch
from mmengine.hooks import Hook
from mmengine.model import BaseModel
from mmengine.runner import Runner
from progress import LAST_STEP, SAVE_EVERY_STEPS, Progress, arguments

BATCH_SIZE = 4
warnings.simplefilter("ignore")
torch.set_num_threads(1)


class Net(BaseModel):  # type: ignore[misc]  # mmengine has no types
    """Learns the sum of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.Dropout(0.2), torch.nn.Linear(32, 1))

    def forward(self, inputs: torch.Tensor, sums: torch.Tensor, mode: str) -> dict[str, torch.Tensor]:
        return {"loss": (self.layers(inputs) - sums).square().mean()}


class Tell(Hook):  # type: ignore[misc]
    """Tells the loss of each step."""

    def __init__(self, progress: Progress, step_seconds: float) -> None:
        self.progress, self.step_seconds = progress, step_seconds

    def before_train_iter(self, runner: Runner, batch_idx: int, data_batch: Any = None) -> None:
        torch.manual_seed(runner.iter)  # it has no generator in its checkpoint

    def after_train_iter(self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        time.sleep(self.step_seconds)
        self.progress.told(runner.iter + 1, outputs["loss"].item())


def main() -> None:
    given = arguments()
    torch.manual_seed(0)
    inputs = torch.randn(BATCH_SIZE * SAVE_EVERY_STEPS, 4, generator=torch.Generator().manual_seed(1))
    runner = Runner(
        Net(),
        str(given.folder),
        train_dataloader={
            "dataset": [{"inputs": row, "sums": row.sum(0, keepdim=True)} for row in inputs],
            "sampler": {"type": "DefaultSampler", "shuffle": True},
            "batch_size": BATCH_SIZE,
            "collate_fn": {"type": "default_collate"},
        },
        train_cfg={"by_epoch": True, "max_epochs": LAST_STEP // SAVE_EVERY_STEPS},
        optim_wrapper={"optimizer": {"type": "AdamW", "lr": 1e-2}},
        param_scheduler={"type": "StepLR", "step_size": 2, "gamma": 0.5},
        default_hooks={"checkpoint": {"type": "CheckpointHook", "interval": 1, "max_keep_ckpts": 2}},
        custom_hooks=[Tell(Progress(given.losses, given.pause_at), given.step_seconds)],
        randomness={"seed": 5},
        resume=True,  # what `last_checkpoint` names, or nothing
        log_level="WARNING",
    )
    runner.train()


if __name__ == "__main__":
    main()
