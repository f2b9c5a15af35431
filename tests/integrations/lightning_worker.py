"""Real Lightning Trainers on a tiny model, for processes started by the tests."""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from ckptstore import FastTier, open_store
from ckptstore.errors import CkptstoreError, StateMismatch
from ckptstore.integrations.lightning import CheckpointStoreCallback
from ckptstore.integrations.lightning.trainer_parts import check_strategy
from ckptstore.retention import KeepBest, KeepEvery, KeepLatest

warnings.simplefilter("ignore")
torch.set_num_threads(1)

BATCHES = 5
"""Batches of an epoch, on each rank."""


class Stopped(Exception):
    """Ends a training in the middle."""


class Model(pl.LightningModule):
    """Counts what it has seen in a hook, and notes the loss before every optimizer step."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
        self.losses: dict[int, float] = {}
        self.num_batches = 0
        self.rank_given: int | None = None
        self.kill_at: int | None = None
        self.stop_at: int | None = None
        self.stateful_loader = True

    def configure_model(self) -> None:
        if self.trainer.strategy.__class__.__name__ == "ModelParallelStrategy" and not hasattr(self.layers, "unshard"):
            mesh = self.device_mesh["data_parallel"]  # type: ignore[index]
            for layer in self.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(self.layers, mesh=mesh)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.global_step == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.global_step == self.stop_at:
            raise Stopped
        loss = (self.layers(batch[0]) - batch[1]).square().mean()
        self.losses[self.global_step] = loss.item()
        self.num_batches += 1
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", (self.layers(batch[0]) - batch[1]).square().mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4, gamma=0.8)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def _data(self, seed: int) -> TensorDataset:
        numbers = torch.Generator().manual_seed(seed)
        inputs = torch.randn(BATCHES * 8, 4, generator=numbers)
        return TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())

    def train_dataloader(self) -> Any:
        size, rank = self.trainer.world_size, self.trainer.global_rank
        data = self._data(1)
        sampler: Any = DistributedSampler(data, num_replicas=size, rank=rank, seed=3)
        sampler.set_epoch(self.trainer.fit_loop.epoch_progress.current.processed)  # Lightning does so too late
        loader: Any = StatefulDataLoader if self.stateful_loader else DataLoader
        return loader(data, batch_size=8 // size, sampler=sampler)

    def val_dataloader(self) -> Any:
        return DataLoader(self._data(2), batch_size=20)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["num_batches"] = self.num_batches
        checkpoint["rank"] = self.global_rank

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.num_batches = checkpoint["num_batches"]
        self.rank_given = checkpoint["rank"]


class Fsdp1OnCpu(pl.strategies.FSDPStrategy):
    """Lightning keeps FSDPStrategy itself off the CPU, and lets classes made from it pass; torch wants the device."""

    def _setup_model(self, model: torch.nn.Module) -> torch.nn.Module:
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), **self.kwargs)


def quiet_trainer(*callbacks: Any, **given: Any) -> Any:
    """A Trainer that prints and logs nothing."""
    quiet: Any = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    return pl.Trainer(accelerator="cpu", callbacks=list(callbacks), **quiet, **given)


def strategy_of(name: str) -> Any:
    """The strategy of a test, for the number of processes there are."""
    if name == "fsdp2":
        return pl.strategies.ModelParallelStrategy(
            data_parallel_size=int(os.environ["WORLD_SIZE"]), tensor_parallel_size=1
        )
    return Fsdp1OnCpu() if name == "fsdp1" else name


def fit(
    root: Any,
    *,
    strategy: str,
    max_epochs: int,
    seed: int = 0,
    kill_at: int | None = None,
    stop_at: int | None = None,
    ckpt_path: str | None = None,
    stateful_loader: bool = True,
    callbacks: Sequence[pl.Callback] = (),
    trainer: dict[str, Any] | None = None,
    tier: dict[str, Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """One Trainer from its beginning to its end, or to the step where it is killed."""
    if tier is not None:
        options["fast"] = on_node(root, tier)
    if isinstance(root, str):
        options.setdefault("retention", KeepBest(2, metric="val_loss", mode="min") | KeepLatest(2))
        options.setdefault("missing", "worst")
    callback = CheckpointStoreCallback(root, **options)
    stopper = pl.callbacks.EarlyStopping("val_loss", patience=1000)
    model = Model(seed)
    model.kill_at, model.stop_at, model.stateful_loader = kill_at, stop_at, stateful_loader
    devices = 1 if strategy == "auto" else int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    how: dict[str, Any] = {"devices": devices, "strategy": strategy_of(strategy), "use_distributed_sampler": False}
    fitter = quiet_trainer(callback, stopper, *callbacks, max_epochs=max_epochs, **how, **(trainer or {}))
    fitter.fit(model, ckpt_path=ckpt_path, weights_only=False)
    store = callback.store
    return {
        "losses": model.losses,
        "num_batches": model.num_batches,
        "rank_given": model.rank_given,
        "resumed": callback.resumed.step if callback.resumed else None,
        "was_durable": bool(callback.resumed and callback.resumed.is_durable),
        "live": {checkpoint.step: checkpoint.metrics for checkpoint in store},
        "written_by": {receipt.rank for checkpoint in store for receipt in checkpoint.files if _has_tensors(receipt)},
        "waited": stopper.wait_count,
        "verified": all(checkpoint.verify().ok for checkpoint in store),
    }


def on_node(root: str, tier: dict[str, Any]) -> FastTier:
    """Each process is a node of its own, which has a disk."""
    node = f"node{os.environ.get('RANK', '0')}"
    return FastTier(f"{root}-{node}", node=node, **tier)


def _has_tensors(receipt: Any) -> bool:
    return bool(receipt.name.endswith(".distcp") and receipt.size_bytes > 0)


def stopped_and_resumed(root: str, cases: dict[str, dict[str, Any]], stop_at: int) -> dict[str, Any]:
    """For each case an uninterrupted run, and one that resumes, with other initial weights, one that was stopped."""
    found = {}
    for name, asked in cases.items():
        whole = fit(f"{root}/{name}-whole", **asked)
        with suppress(Stopped):
            fit(f"{root}/{name}", **asked, stop_at=stop_at)
        found[name] = (whole, fit(f"{root}/{name}", **asked, seed=7))
    return found


def plain_losses(root: str, cases: list[str]) -> list[tuple[float, float]]:
    """`plain_loss` of each case."""
    return [plain_loss(f"{root}/{name}") for name in cases]


def plain_loss(root: str) -> tuple[float, float]:
    """The validation loss that a checkpoint tells, and that of its model on one process without a Trainer."""
    with open_store(root) as store:
        checkpoint: Any = store.latest()
        model = Model(seed=9)
        checkpoint.load({"model": model})
    inputs, targets = model._data(2).tensors
    return checkpoint.metrics["val_loss"], (model.layers(inputs) - targets).square().mean().item()


def whole_then_killed(root: str, asked: dict[str, Any], kill_at: int, tier: dict[str, Any]) -> None:
    """An uninterrupted run, whose result goes to a file, then one with a fast tier that is killed."""
    result = fit(f"{root}/whole", **asked)
    torch.save(result, f"{root}/whole-{os.environ['RANK']}.pt")
    fit(f"{root}/killed", **asked, tier=tier, kill_at=kill_at)


def resumed(root: str, asked: dict[str, Any], tier: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The uninterrupted run's result, and that of a run with other initial weights that resumes the killed one."""
    whole = torch.load(f"{root}/whole-{os.environ['RANK']}.pt", weights_only=False)
    return whole, fit(f"{root}/killed", **asked, tier=tier, seed=7)


def interrupted(root: str) -> tuple[list[str], dict[str, Any]]:
    """What is left of a tier in the process when a training with it has raised, and the next training there."""
    asked: dict[str, Any] = {"strategy": "auto", "max_epochs": 3, "every_n_train_steps": 3, "asynchronous": True}
    with suppress(Stopped):
        fit(root, **asked, stop_at=8, tier={"drain_bytes_per_second": 1.0})
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("ckptstore")]
    return left, fit(root, **asked, seed=7, tier={})


def preempted(root: str) -> tuple[list[int], list[int]]:
    """SIGTERM during an epoch: what the store has afterwards, when it was told of the time that is left and when not.

    The policy of the tier asks for the first checkpoint of twenty steps alone.
    """
    found = []
    for seconds in (60.0, None):
        place = f"{root}-{seconds}"
        tier = on_node(place, {"drain": KeepEvery(steps=20)})
        callback = CheckpointStoreCallback(place, every_n_train_steps=2, fast=tier)
        if seconds is not None:
            callback.store.install_sigterm(seconds)
        with suppress(SystemExit):
            quiet_trainer(callback, Preempts(), max_epochs=3).fit(Model(0))
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with open_store(place) as store:
            found.append([checkpoint.step for checkpoint in store])
    return found[0], found[1]


class Preempts(pl.Callback):
    """A scheduler takes the machine back in step 7."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 6:
            os.kill(os.getpid(), signal.SIGTERM)


def without_resume(root: str) -> dict[str, Any]:
    """What keeps a run from resuming: `resume=False`, a path that was given, a Trainer that has trained already."""
    fit(root, strategy="auto", max_epochs=2)
    off = fit(root, strategy="auto", max_epochs=3, resume=False)

    path = f"{root}-plain.ckpt"
    model = Model(seed=3)
    trainer = quiet_trainer(max_epochs=1, enable_checkpointing=False)
    trainer.fit(model)
    trainer.save_checkpoint(path)
    given = fit(root, strategy="auto", max_epochs=3, ckpt_path=path)

    model = Model(seed=0)
    callback = CheckpointStoreCallback(f"{root}-twice", every_n_epochs=1)
    trainer = quiet_trainer(callback, max_epochs=2)
    trainer.fit(model)
    trainer.fit_loop.max_epochs = 3
    with torch.no_grad():
        model.layers[2].bias.fill_(100.0)
    trainer.fit(model)
    callback.store.close()
    callback = CheckpointStoreCallback(f"{root}-dry", every_n_train_steps=1)
    quiet_trainer(callback, fast_dev_run=3).fit(Model(0))
    files = [*os.listdir("."), *(["store"] if os.path.exists(f"{root}-dry") else [])]
    return {"off": off, "given": given, "bias": model.layers[2].bias.item(), "files": files}


def other_size(root: str) -> tuple[str, dict[str, Any]]:
    """Resume on one process what two have saved: refused, until it is said what becomes of their own values."""
    try:
        fit(root, strategy="auto", max_epochs=4)
    except StateMismatch as error:
        refused = str(error)
    return refused, fit(root, strategy="auto", max_epochs=4, load_options={"per_rank": "first"})


def refusals(root: str) -> list[str]:
    """The errors for what cannot be saved."""
    found = []
    deepspeed = object.__new__(pl.strategies.DeepSpeedStrategy)
    pointer = Path(root).with_name("pointer")
    pointer.mkdir()
    for action in (
        lambda: check_strategy(deepspeed),
        lambda: fit(root, strategy="auto", max_epochs=1, callbacks=[AsksForWeights()]),
        lambda: fit("s3:/", strategy="auto", max_epochs=1),
        lambda: fit(root, strategy="auto", max_epochs=1, ckpt_path=str(pointer / "checkpoint.ckpt")),
        lambda: CheckpointStoreCallback(root, save_top_k=3),
        lambda: CheckpointStoreCallback(root, retension=KeepLatest(1)),
        lambda: CheckpointStoreCallback(root, save_weights_only=True),
        lambda: CheckpointStoreCallback(root, train_time_interval=60),
        lambda: CheckpointStoreCallback(root, resume=False, load_options={"strict": False}),
        lambda: fit(f"{root}-mistyped", strategy="auto", max_epochs=4, monitor="valloss"),
    ):
        try:
            action()
        except (CkptstoreError, FileNotFoundError) as error:
            step = getattr(error, "step", None) or ""
            found.append(" ".join([str(error), *getattr(error, "__notes__", []), str(step)]))
    return found


class AsksForWeights(pl.Callback):
    """Wants to change what is saved of the model."""

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"].clear()


class Breaks(pl.Callback):
    """Takes the place of the checkpoints away in epoch 1, and gives it back in epoch 2, when the save has failed."""

    def __init__(self, root: str) -> None:
        self.place, self.hidden = Path(root, "checkpoints"), Path(root, "hidden")

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 1:
            self._wait(trainer)
            self.place.rename(self.hidden)
            self.place.write_text("no directory")
        if trainer.current_epoch == 2:
            self._wait(trainer)
            self.place.unlink()
            self.hidden.rename(self.place)

    def _wait(self, trainer: Any) -> None:
        pending = trainer.checkpoint_callback._pending
        while not pending.done():
            time.sleep(0.01)


def failing(root: str) -> list[tuple[str, list[int]]]:
    """An asynchronous save fails: what comes of it, and the steps that are live, without tolerance and with it."""
    found = []
    for max_failures in (0, 1):
        place, text = f"{root}-{max_failures}", ""
        options = {"asynchronous": True, "save_options": {"max_failures": max_failures}, "retention": KeepLatest(9)}
        try:
            fit(place, strategy="auto", max_epochs=4, callbacks=[Breaks(place)], **options)
        except CkptstoreError as error:
            text = f"{type(error).__name__} at step {error.step}"
        with open_store(place) as store:
            found.append((text, [checkpoint.step for checkpoint in store]))
    return found


def validated_best(root: str, strategy: str) -> tuple[float, float | None, float, float]:
    """The loss of the best and of the last checkpoint in another model, each with what was told of it at its save, to a
    fast tier first."""
    store = open_store(root, retention=KeepBest(1, "val_loss") | KeepLatest(1), fast=on_node(root, {}))
    callback = CheckpointStoreCallback(store, monitor="val_loss")
    how: dict[str, Any] = {"devices": int(os.environ["LOCAL_WORLD_SIZE"]), "strategy": strategy_of(strategy)}
    trainer = quiet_trainer(callback, max_epochs=2, use_distributed_sampler=False, **how)
    trainer.fit(Model(0))
    (found,) = trainer.validate(Model(9), ckpt_path="best", weights_only=False, verbose=False)
    told = callback.best_model_score
    (last,) = trainer.validate(Model(9), ckpt_path="last", weights_only=False, verbose=False)
    latest: Any = store.latest()
    store.close()
    return found["val_loss"], told, last["val_loss"], latest.metrics["val_loss"]
