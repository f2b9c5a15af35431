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
        self.batches: list[tuple[int, int, float]] = []
        """Epoch, number and sum of each."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.batches.append((self.trainer.current_epoch, batch_idx, batch.sum().item()))
        return self.layer(batch).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Only that there is a validation."""

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


def by_steps(root: str, stops_at: int, every: dict[str, int], given: dict[str, int], *, validates: bool) -> list[Any]:
    """The batches and weights of a fit of 12 steps, three an epoch, that stops after some and goes on."""
    torch.manual_seed(1)
    data = DataLoader(torch.arange(48.0).reshape(12, 4) / 48, batch_size=4)
    seen: list[Any] = []
    for last in sorted({stops_at, 12}):
        torch.manual_seed(2)
        module = Small()
        trainer = pytorch_lightning.Trainer(
            accelerator="cpu",
            callbacks=[CheckpointStoreCallback(root, **every)],
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            max_steps=last,
            **given,
        )
        trainer.fit(module, data, data if validates else None)
        seen += module.batches
    return [*seen, module.layer.weight.tolist()]


def ends_of_epochs(root: str) -> list[tuple[str, bool]]:
    """For ways to train and to save: whether a fit that was stopped at the end of an epoch is as one that was not. One
    that was stopped in the middle goes on with the next batch there, though a plain loader begins anew."""
    found = []
    for validates in (False, True):
        for given in ({}, {"max_epochs": 4}):
            whole = by_steps(f"{root}/{validates}{len(given)}", 12, {"every_n_epochs": 100}, given, validates=validates)
            for every in ({"every_n_train_steps": 3}, {"every_n_epochs": 1}):
                for stops_at in (3, 4, 6):
                    if stops_at == 4 and ("every_n_train_steps" in every or given):
                        continue  # nothing was saved there; with `max_epochs` Lightning itself leaves the epoch
                    name = f"{validates} {given} {every} {stops_at}"
                    batches = by_steps(f"{root}/{name}", stops_at, every, given, validates=validates)
                    numbers = [batch[:2] for batch in batches[:-1]] == [batch[:2] for batch in whole[:-1]]
                    found.append((name, numbers and (stops_at == 4 or batches == whole)))
    return found
