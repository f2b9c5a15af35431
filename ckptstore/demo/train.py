"""One rank of the demo's training job: `python -m ckptstore.demo.train --store URI`, with the environment that torchrun
sets. It resumes where the store says, saves after every epoch, and prints what it does on rank 0."""

from __future__ import annotations

import argparse
import json
import logging
import math
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from ckptstore import Checkpoint, CheckpointStore, KeepBest, KeepLatest, open_store
from ckptstore.demo.model import Digits, ResNet18, load_digits
from ckptstore.events import (
    CheckpointCommitted,
    CheckpointSkipped,
    Event,
    PruneFailed,
    RequestRetried,
    SaveFailed,
    listening,
)
from ckptstore.testing import KillAt
from ckptstore.testing.stores import with_faults

RETENTION = KeepLatest(2) | KeepBest(1, metric="eval_loss", mode="min")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The command line."""

    store: str
    sharded: bool
    width: int
    epochs: int
    batch_size: int
    seed: int
    kill_rank: int
    kill_step: int | None
    report: Path | None


def parse_options() -> Options:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", required=True, help="URI of the store")
    parser.add_argument("--sharded", action="store_true", help="FSDP2 instead of DDP")
    parser.add_argument("--width", type=int, default=32, help="channels of the stem; 64 is the ResNet-18 of the paper")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=120, help="images per step, over all ranks")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kill-step", type=int, help="have a rank die by SIGKILL in its upload of this step")
    parser.add_argument("--kill-rank", type=int, default=0, help="which one")
    parser.add_argument("--report", type=Path, help="where rank 0 writes its loss curve")
    return Options(**vars(parser.parse_args()))


@dataclass
class Trainer:
    """The state of the training, and what changes it."""

    options: Options
    model: nn.Module = field(init=False)
    optimizer: torch.optim.Optimizer = field(init=False)
    schedule: torch.optim.lr_scheduler.LRScheduler = field(init=False)
    epoch: int = 0
    """Epochs that are done."""
    losses: list[float] = field(default_factory=list)
    """The mean loss over all ranks, of every step."""

    def __post_init__(self) -> None:
        options = self.options
        torch.manual_seed(options.seed)
        model = ResNet18(options.width)
        if options.sharded:
            for block in model.blocks:
                fully_shard(block)
            fully_shard(model)
        self.model = model if options.sharded else DistributedDataParallel(model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-3)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, gamma=0.7)
        torch.manual_seed(options.seed + 1 + dist.get_rank())  # every rank shifts its images in its own way

    def train_epoch(self, digits: Digits) -> None:
        """One pass over the digits."""
        self.model.train()
        for images, labels in self._batches(digits):
            loss = functional.cross_entropy(self.model(images), labels)
            torch.autograd.backward(loss)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.losses.append(mean_over_ranks(loss.detach()))
        self.schedule.step()
        self.epoch += 1

    def evaluate(self, digits: Digits) -> dict[str, float]:
        """Loss and accuracy on digits that were not trained on."""
        self.model.eval()
        mine = slice(dist.get_rank(), None, dist.get_world_size())
        with torch.no_grad():
            logits = self.model(digits.images[mine])
        loss = functional.cross_entropy(logits, digits.labels[mine])
        right = (logits.argmax(dim=1) == digits.labels[mine]).float().mean()
        return {"eval_loss": mean_over_ranks(loss), "eval_accuracy": mean_over_ranks(right)}

    def _batches(self, digits: Digits) -> Iterator[tuple[Tensor, Tensor]]:
        """This rank's part of every batch: the order follows from seed and epoch, the shifts from the rank's RNG."""
        generator = torch.Generator().manual_seed(self.options.seed * 1000 + self.epoch)
        order = torch.randperm(len(digits), generator=generator)
        for start in range(0, len(order) - self.options.batch_size + 1, self.options.batch_size):
            batch = order[start : start + self.options.batch_size]
            mine = batch[dist.get_rank() :: dist.get_world_size()]
            down, right = torch.randint(-1, 2, (2,)).tolist()
            yield digits.images[mine].roll((down, right), dims=(2, 3)), digits.labels[mine]


def mean_over_ranks(value: Tensor) -> float:
    """The mean of a scalar over all ranks."""
    value = value.clone().double()
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()


def save(store: CheckpointStore, trainer: Trainer, metrics: dict[str, float]) -> None:
    """Save from all ranks: what every rank has alone, and what is the same on all of them once."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        if trainer.options.sharded or dist.get_rank() == 0:
            model, optimizer = get_state_dict(trainer.model, trainer.optimizer)
            torch.save(local_tensors([model, optimizer, trainer.schedule.state_dict()]), directory / "model.pt")
        torch.save(torch.get_rng_state(), directory / "rng.pt")
        metadata = {"losses": trainer.losses, "sharded": trainer.options.sharded}
        store.save_directory(trainer.epoch, directory, metrics=metrics, metadata=metadata)


def load(checkpoint: Checkpoint, trainer: Trainer) -> None:
    """Take over what `save` saved, on the same number of ranks."""
    model, optimizer = get_state_dict(trainer.model, trainer.optimizer)
    rank = dist.get_rank()
    with checkpoint.as_directory() as path:
        own = {file.original_name or file.name: path / file.name for file in checkpoint.files if file.rank == rank}
        stored = torch.load(own.get("model.pt", path / "model.pt"), weights_only=True)
        torch.set_rng_state(torch.load(own["rng.pt"], weights_only=True))
    set_state_dict(
        trainer.model,
        trainer.optimizer,
        model_state_dict=fill(model, stored[0]),
        optim_state_dict=fill(optimizer, stored[1]),
    )
    trainer.schedule.load_state_dict(stored[2])
    trainer.epoch = checkpoint.step
    trainer.losses = [float(loss) for loss in checkpoint.metadata["losses"]]


def local_tensors(value: Any) -> Any:
    """The same nested value with this rank's part of every sharded tensor."""
    if isinstance(value, dict):
        return {name: local_tensors(item) for name, item in value.items()}
    if isinstance(value, list):
        return [local_tensors(item) for item in value]
    return value.to_local() if isinstance(value, DTensor) else value


def fill(value: Any, stored: Any) -> Any:
    """`value` with the contents of `stored`, which `local_tensors` made of a value like it."""
    if isinstance(value, dict):
        return {name: fill(item, stored[name]) for name, item in value.items()}
    if isinstance(value, Tensor):
        local = value.to_local() if isinstance(value, DTensor) else value
        local.copy_(stored)
        return value
    return stored


def run(options: Options) -> None:
    """Train to the last epoch, from wherever the store is."""
    is_first = dist.get_rank() == 0
    store = open_store(options.store, retention=RETENTION)
    if options.kill_step is not None and options.kill_rank == dist.get_rank():
        pattern = f"checkpoints/step-{options.kill_step:010d}-*"
        store = with_faults(store, KillAt(f"write* {pattern}", when="during"))
    train_digits, eval_digits = load_digits()
    trainer = Trainer(options)
    with store:
        checkpoint = store.resume()
        if checkpoint is not None:
            load(checkpoint, trainer)
        if is_first and checkpoint is not None:
            print(f"resumed from step {checkpoint.step}, saved by {checkpoint.world_size} ranks", flush=True)
        while trainer.epoch < options.epochs:
            trainer.train_epoch(train_digits)
            metrics = trainer.evaluate(eval_digits)
            if is_first:
                text = "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())
                print(f"epoch {trainer.epoch}  train_loss {trainer.losses[-1]:.4f}  {text}", flush=True)
            save(store, trainer, metrics)
    if not all(map(math.isfinite, trainer.losses)):
        raise ArithmeticError(f"the training diverged: {trainer.losses}")
    if is_first and options.report:
        options.report.write_text(json.dumps(trainer.losses))


def show(event: Event) -> None:
    """Print what the user of a training job wants to see."""
    if isinstance(event, CheckpointCommitted):
        size_mb, seconds = event.size_bytes / 1e6, event.seconds
        print(f"committed step {event.step}: {size_mb:.1f} MB from all ranks in {seconds:.2f} s", flush=True)
    elif isinstance(event, CheckpointSkipped | SaveFailed | PruneFailed | RequestRetried):
        print(event, flush=True)


def main() -> None:
    """Be one rank."""
    options = parse_options()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    is_first = dist.get_rank() == 0
    handler = logging.StreamHandler()
    handler.addFilter(lambda record: not hasattr(record, "event"))  # `show` prints those that matter here
    logging.basicConfig(format="%(message)s", level=logging.INFO if is_first else logging.WARNING, handlers=[handler])
    try:
        with listening(show) if is_first else nullcontext():
            run(options)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
