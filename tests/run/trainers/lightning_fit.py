"""Lightning's Trainer with its own ModelCheckpoint: `last.ckpt` is a link to the newest of the others."""

from __future__ import annotations

import time
import warnings
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from progress import LAST_STEP, SAVE_EVERY_STEPS, Progress, arguments
from torch.utils.data import DataLoader, TensorDataset

warnings.simplefilter("ignore")
torch.set_num_threads(1)


class Fit(pl.LightningModule):
    """Two layers with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Dropout(0.2), torch.nn.Linear(64, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = (self.layers(batch[0]) - batch[1]).square().mean()
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


class Tell(pl.Callback):
    """Tells the loss of each step, and makes the dropout of a step depend on its number alone: Lightning's
    checkpoints do not hold the state of generators."""

    def __init__(self, progress: Progress, step_seconds: float) -> None:
        self.progress, self.step_seconds = progress, step_seconds

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        torch.manual_seed(trainer.global_step)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        time.sleep(self.step_seconds)
        self.progress.told(trainer.global_step, outputs["loss"].item())


def main() -> None:
    given = arguments()
    pl.seed_everything(3, verbose=False)
    numbers = torch.Generator().manual_seed(1)
    inputs = torch.randn(4 * SAVE_EVERY_STEPS, 8, generator=numbers)  # an epoch for each checkpoint: its end is where
    # Lightning resumes exactly, since a plain DataLoader has no place in the middle of an epoch
    data = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=4)
    saves = ModelCheckpoint(
        dirpath=given.folder, every_n_epochs=1, save_top_k=2, save_last="link", monitor="train_loss"
    )
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=LAST_STEP // SAVE_EVERY_STEPS,
        callbacks=[Tell(Progress(given.losses, given.pause_at), given.step_seconds), saves],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Fit(), data, ckpt_path="last")


if __name__ == "__main__":
    main()
