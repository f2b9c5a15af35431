"""Lightning's Trainer: `lightning_fit.py OUT [--stock]`. It resumes, saves, and
writes its last weights.

With `--stock` it saves with Lightning's own `ModelCheckpoint(save_last=True)`, into OUT/folder.
"""

from __future__ import annotations

import logging
import warnings
from typing import Any

import lightning.pytorch as pl
import torch
from common import LAST_STEP, SAVE_EVERY_STEPS, arguments
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

from ckptstore.integrations.lightning import CheckpointStoreCallback

warnings.simplefilter("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
torch.set_num_threads(1)


class Fit(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return (self.layers(batch[0]) - batch[1]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


class Tell(pl.Callback):
    """Says where the training begins."""

    step = LAST_STEP
    """That of a fit without a step to take."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.step = trainer.global_step


def main() -> None:
    given = arguments()
    pl.seed_everything(3, verbose=False)
    inputs = torch.randn(8, 8)  # two steps an epoch, for the place in the data is not in a checkpoint of Lightning
    data = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=4)
    save: pl.Callback
    tell = Tell()
    if given.stock:
        save = ModelCheckpoint(
            given.folder, "ck-{step}", save_last=True, save_top_k=-1, every_n_train_steps=SAVE_EVERY_STEPS
        )
    else:
        save = CheckpointStoreCallback(given.out / "store", every_n_train_steps=SAVE_EVERY_STEPS)
    trainer = pl.Trainer(
        max_steps=LAST_STEP,
        accelerator="cpu",
        callbacks=[save, tell],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Fit()
    trainer.fit(model, data, ckpt_path="last" if given.stock else None)
    print(f"resumed from step {tell.step}")
    torch.save(model.state_dict(), given.out / "final.pt")


if __name__ == "__main__":
    main()
