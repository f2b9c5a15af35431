"""Run one rank of the demo's training job: `python -m ckptstore.tools.demo.train --store URI`, under torchrun.

It resumes from the store, saves after every epoch, and prints its progress on rank 0.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from ckptstore import CheckpointStore, KeepBest, KeepLatest, open_store
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
from ckptstore.tools.demo.resnet import Digits, ResNet18, load_digits

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
    digits: Path | None = None


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
    parser.add_argument("--digits", type=Path, help="a file with the digits; without it scikit-learn's are read")
    return Options(**vars(parser.parse_args()))


@dataclass
class Progress:
    """The progress of the training; `state_dict` and `load_state_dict` make it storable."""

    epoch: int = 0
    """Completed epochs."""
    losses: list[float] = field(default_factory=list)
    """The mean loss over all ranks, of every step."""
    eval_losses: list[float] = field(default_factory=list)
    """The loss on held-out digits, after every epoch."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state, the same on all ranks and so stored once."""
        return {"epoch": self.epoch, "losses": self.losses, "eval_losses": self.eval_losses}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved state."""
        self.epoch, self.losses, self.eval_losses = state["epoch"], list(state["losses"]), list(state["eval_losses"])


class RandomNumbers:
    """The random numbers of this rank. They differ from rank to rank, so each rank's are stored."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state of torch's generator on the CPU, the only one that the demo uses."""
        return {"torch": torch.get_rng_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved state."""
        torch.set_rng_state(state["torch"])


@dataclass
class Trainer:
    """The model, and everything that trains it."""

    options: Options
    model: nn.Module = field(init=False)
    optimizer: torch.optim.Optimizer = field(init=False)
    schedule: torch.optim.lr_scheduler.LRScheduler = field(init=False)
    progress: Progress = field(default_factory=Progress)

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
        torch.manual_seed(options.seed + 1 + dist.get_rank())  # every rank shifts its images differently

    @property
    def state(self) -> dict[str, Any]:
        """Everything that a resume needs."""
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "schedule": self.schedule,
            "progress": self.progress,
            "random_numbers": RandomNumbers(),
        }

    def train_epoch(self, digits: Digits, after_step: Callable[[], None] | None = None) -> None:
        """Make one pass over the digits, or the rest of one after a resume in its middle.

        `after_step` is called after each new loss. A resume from a save in it continues with the next batch.
        """
        self.model.train()
        for images, labels in self._batches(digits):
            loss = functional.cross_entropy(self.model(images), labels)
            torch.autograd.backward(loss)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.progress.losses.append(mean_over_ranks(loss.detach()))
            if after_step is not None:
                after_step()
        self.schedule.step()
        self.share_buffers()
        self.progress.epoch += 1

    def share_buffers(self) -> None:
        """Broadcast rank 0's buffers: each rank has seen other images. DDP does this in its forward pass."""
        for buffer in self.model.buffers():
            dist.broadcast(buffer, src=0)

    def evaluate(self, digits: Digits) -> dict[str, float]:
        """Return loss and accuracy on held-out digits."""
        self.model.eval()
        mine = slice(dist.get_rank(), None, dist.get_world_size())
        with torch.no_grad():
            logits = self.model(digits.images[mine])
        loss = functional.cross_entropy(logits, digits.labels[mine], reduction="sum")
        right = (logits.argmax(dim=1) == digits.labels[mine]).sum()
        share = dist.get_world_size() / len(digits)
        return {"eval_loss": mean_over_ranks(loss) * share, "eval_accuracy": mean_over_ranks(right) * share}

    def _batches(self, digits: Digits) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this rank's part of every batch: the order follows from seed and epoch, shifts from the rank's RNG."""
        generator = torch.Generator().manual_seed(self.options.seed * 1000 + self.progress.epoch)
        order, size = torch.randperm(len(digits), generator=generator), self.options.batch_size
        per_epoch = len(order) // size
        for number in range(len(self.progress.losses) - self.progress.epoch * per_epoch, per_epoch):
            batch = order[number * size : (number + 1) * size]
            mine = batch[dist.get_rank() :: dist.get_world_size()]
            down, right = torch.randint(-1, 2, (2,)).tolist()
            yield digits.images[mine].roll((down, right), dims=(2, 3)), digits.labels[mine]


def mean_over_ranks(value: Tensor) -> float:
    """Return the mean of a scalar over all ranks."""
    value = value.clone().double()
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()


def run(options: Options, store: CheckpointStore, tell: Callable[[str], None]) -> None:
    """Train to the last epoch, resuming from the store. Rank 0 reports."""
    train_digits, eval_digits = load_digits(options.digits)
    trainer = Trainer(options)
    progress = trainer.progress
    with store:
        checkpoint = store.resume(trainer.state, per_rank="first")
        if checkpoint is not None:
            eval_loss = trainer.evaluate(eval_digits)["eval_loss"]
            num_ranks = dist.get_world_size()
            tell(f"resumed from step {checkpoint.step}; ranks now: {num_ranks}, at the save: {checkpoint.world_size}")
            tell(f"eval_loss {eval_loss:.6f}, at the save {checkpoint.metrics['eval_loss']:.6f}")
            if not math.isclose(eval_loss, checkpoint.metrics["eval_loss"], rel_tol=1e-4):
                raise ArithmeticError("what was loaded is not what was saved")
        while progress.epoch < options.epochs:
            trainer.train_epoch(train_digits)
            metrics = trainer.evaluate(eval_digits)
            progress.eval_losses.append(metrics["eval_loss"])
            shown = "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())
            tell(f"epoch {progress.epoch}  train_loss {progress.losses[-1]:.4f}  {shown}")
            store.save(progress.epoch, trainer.state, metrics=metrics)
    if not all(map(math.isfinite, progress.losses)):
        raise ArithmeticError(f"the training diverged: {progress.losses}")
    if options.report and dist.get_rank() == 0:
        options.report.write_text(json.dumps(progress.losses))


def open_demo_store(options: Options) -> CheckpointStore:
    """Open the store of the command line, with the fault that it requests."""
    store = open_store(options.store, retention=RETENTION)
    if options.kill_step is not None and options.kill_rank == dist.get_rank():
        pattern = f"checkpoints/step-{options.kill_step:010d}-*"
        store = with_faults(store, KillAt(f"write* {pattern}", when="during"))
    return store


def showing(tell: Callable[[str], None]) -> Callable[[Event], None]:
    """Return a listener that reports what the user of a training job wants to see."""

    def show(event: Event) -> None:
        if isinstance(event, CheckpointCommitted):
            size_mb, seconds = event.size_bytes / 1e6, event.seconds
            tell(f"committed step {event.step}: {size_mb:.1f} MB from all ranks in {seconds:.2f} s")
        elif isinstance(event, CheckpointSkipped | SaveFailed | PruneFailed | RequestRetried):
            tell(str(event))

    return show


def main() -> None:
    """Run one rank."""
    options = parse_options()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    is_first = dist.get_rank() == 0
    handler = logging.StreamHandler()
    handler.addFilter(lambda record: not hasattr(record, "event"))  # `show` prints those that matter
    logging.basicConfig(format="%(message)s", level=logging.INFO if is_first else logging.WARNING, handlers=[handler])

    def tell(text: str) -> None:
        if is_first:
            print(text, flush=True)

    try:
        with listening(showing(tell)) if is_first else nullcontext():
            run(options, open_demo_store(options), tell)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
