"""The trainer of Coqui TTS: `checkpoint_3.pth` in a step, and `best_model_13.pth` with its copy `best_model.pth` after
an epoch. The directory of a run has the date of its first start in its name. `ckptstore run` gets the one above it,
`output_path`, and each later start finds in there what `--continue_path` needs.

Coqui numbers steps from 0, which is not told here, and goes on with the number after the one in a checkpoint: right
for what it saves in a step, and one too many for what it saves after an epoch. Nor does it go on in the middle of an
epoch. So this is one epoch, and its batches are those of the steps that are left.
"""

from __future__ import annotations

import time
import warnings
from typing import Any

import torch
from progress import LAST_STEP, SAVE_EVERY_STEPS, Progress, arguments
from trainer import Trainer, TrainerArgs, TrainerConfig, TrainerModel
from trainer.logging.dummy_logger import DummyLogger

warnings.simplefilter("ignore")
torch.set_num_threads(1)


class Net(TrainerModel):  # type: ignore[misc]  # its types are not seen
    """Learns the sum of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.Dropout(0.2), torch.nn.Linear(32, 1))
        self.begins_at, self.loss = 0, 0.0

    def on_init_end(self, trainer: Trainer) -> None:
        self.begins_at = trainer.total_steps_done

    def get_data_loader(self, *_: Any, **__: Any) -> Any:
        return torch.utils.data.DataLoader([{"step": step} for step in range(self.begins_at, LAST_STEP + 1)])

    def get_criterion(self) -> torch.nn.Module:
        return torch.nn.MSELoss()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.layers(inputs)
        return outputs

    def train_step(self, batch: dict[str, torch.Tensor], criterion: torch.nn.Module) -> Any:
        torch.manual_seed(int(batch["step"]))  # it has no generator in its checkpoint
        inputs = torch.randn(8, 4)
        outputs = self(inputs)
        loss = criterion(outputs, inputs.sum(1, keepdim=True))
        self.loss = loss.item()
        return {"model_outputs": outputs}, {"loss": loss}


def main() -> None:
    given = arguments()
    progress = Progress(given.losses, given.pause_at)

    def tell(trainer: Trainer) -> None:
        time.sleep(given.step_seconds)
        if step := trainer.total_steps_done - 1:
            progress.told(step, trainer.model.loss)

    saved = next(given.folder.glob("*/*.pth"), None)
    args = TrainerArgs() if saved is None else TrainerArgs(continue_path=str(saved.parent))
    config = TrainerConfig(
        output_path=str(given.folder), epochs=1, run_eval=False, save_step=SAVE_EVERY_STEPS, save_n_checkpoints=2
    )
    config.optimizer, config.lr = "AdamW", 1e-2
    torch.manual_seed(0)
    callbacks, logger = {"on_train_step_end": tell}, DummyLogger()
    Trainer(
        args, config, model=Net(), callbacks=callbacks, dashboard_logger=logger, parse_command_line_args=False
    ).fit()


if __name__ == "__main__":
    main()
