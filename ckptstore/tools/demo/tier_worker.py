"""Run one rank of the demo with a fast tier: `python -m ckptstore.tools.demo.tier_worker`, under torchrun.

It saves after every training step. Rank 0 prints events, one JSON object a line, for the story to tell and draw.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ckptstore import CheckpointStore, FastTier, PendingSave, open_store
from ckptstore.events import (
    CheckpointCommitted,
    CheckpointResumed,
    CheckpointSkipped,
    DrainFailed,
    DrainStalled,
    Event,
    FastBypassed,
    FastCommitted,
    SaveFailed,
    listening,
)
from ckptstore.tools.demo.resnet import Digits, load_digits
from ckptstore.tools.demo.train import Options, Trainer

BATCH_SIZE = 160
TROUBLE = (CheckpointSkipped, DrainFailed, DrainStalled, FastBypassed, SaveFailed)
"""Events that the demo does not expect, and prints."""


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", help="URI of the store; without it nothing is saved")
    parser.add_argument("--disks", type=Path, nargs="*", help="a directory for each node, of that node's name")
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--digits", type=Path, required=True, help="a file with the digits")
    parser.add_argument("--step-seconds", type=float, default=0.0, help="a step takes at least so long")
    return parser.parse_args()


def tell(what: str, **facts: Any) -> None:
    """Print one line for the story, on rank 0."""
    if dist.get_rank() == 0:
        line = json.dumps({"what": what, "at": time.time(), **facts})
        print(f"{line}\n", end="", flush=True)  # at once: events come on several threads


def tell_event(event: Event) -> None:
    """Print an event that is part of the story."""
    if isinstance(event, FastCommitted):
        tell("fast", step=event.step, seconds=event.seconds, num_nodes=event.num_nodes, size_bytes=event.size_bytes)
    elif isinstance(event, CheckpointCommitted):
        tell("durable", step=event.step)
    elif isinstance(event, CheckpointResumed):
        tell("resumed", step=event.step, number=event.number)
    elif isinstance(event, TROUBLE):
        tell("trouble", text=event.line())


def train(
    trainer: Trainer, digits: Digits, store: CheckpointStore | None, *, step_seconds: float
) -> PendingSave | None:
    """Train to the last epoch, and return the last save."""
    progress = trainer.progress
    pending: PendingSave | None = None
    started = time.monotonic()

    def after_step() -> None:
        nonlocal pending, started
        step = len(progress.losses)
        if store is not None:
            trainer.share_buffers()
            time.sleep(max(0.0, started + step_seconds - time.monotonic()))
            tell("step", step=step, loss=progress.losses[-1])
            pending = store.save_async(step, trainer.state)
        started = time.monotonic()

    while progress.epoch < trainer.options.epochs:
        trainer.train_epoch(digits, after_step)
    return pending


def main() -> None:
    """Run one rank."""
    arguments = parse_options()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    options = Options(
        store=arguments.store or "",
        sharded=True,
        width=arguments.width,
        epochs=arguments.epochs,
        batch_size=BATCH_SIZE,
        seed=0,
        kill_rank=0,
        kill_step=None,
        report=None,
    )
    trainer, digits = Trainer(options), load_digits(arguments.digits)[0]
    tell("started")
    if arguments.store is None:
        train(trainer, digits, None, step_seconds=0.0)
    else:
        disk = arguments.disks[dist.get_rank() * len(arguments.disks) // dist.get_world_size()]
        fast = FastTier(disk, node=disk.name, copies=2)
        with listening(tell_event), open_store(arguments.store, fast=fast) as store:
            store.resume(trainer.state)
            pending = train(trainer, digits, store, step_seconds=arguments.step_seconds)
            if pending is not None:
                pending.result()
            tell("trained", health=asdict(store.health()))
            store.drain()
            tell("drained", health=asdict(store.health()))
    tell("losses", losses=trainer.progress.losses)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
