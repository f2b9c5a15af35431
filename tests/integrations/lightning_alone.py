"""A Trainer of `pytorch_lightning`, the other name under which Lightning is installed."""

from __future__ import annotations

from typing import Any

import pytorch_lightning
import torch
from torch.utils.data import DataLoader

from ckptstore.integrations.lightning import CheckpointStoreCallback


class Small(pytorch_lightning.LightningModule):
    """One layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def other_name_of_lightning(root: str) -> tuple[list[str], int | None]:
    """Train twice; the packages that the callback's classes are from, and the step that the second run resumed from."""
    for _ in range(2):
        callback = CheckpointStoreCallback(root)
        trainer = pytorch_lightning.Trainer(
            accelerator="cpu", max_epochs=2, callbacks=[callback], logger=False, enable_progress_bar=False
        )
        trainer.fit(Small(), DataLoader(torch.ones(8, 4), batch_size=4))
    names = [cls.__module__.partition(".")[0] for cls in CheckpointStoreCallback.__mro__]
    return names, callback.resumed.step if callback.resumed else None
