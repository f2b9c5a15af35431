"""Run inside Ray: a worker of the training, and the actor that reads digits with the trained model."""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import ckptstore
from ckptstore import KeepBest, KeepLatest
from ckptstore.events import Event, FileStored, listening
from ckptstore.tools.demo.resnet import ResNet18
from ckptstore.tools.demo.train import Options, run, showing

TOP_K = 2
BATCH_SIZE = 120


def train(config: dict[str, Any]) -> None:
    """Train one worker. Rank 0 writes its lines to the file `config["log"]`.

    In the first start of the run the last rank dies by SIGKILL when it has stored its part of step `kill_step`.
    """
    torch.set_num_threads(1)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    store = ckptstore.ray.store(retention=KeepBest(TOP_K, metric="eval_loss", mode="min") | KeepLatest(1))
    options = Options(
        store=store.uri,
        sharded=config["sharded"],
        width=config["width"],
        epochs=config["epochs"],
        batch_size=BATCH_SIZE,
        seed=0,
        kill_rank=world_size - 1,
        kill_step=config["kill_step"] if store.latest() is None else None,
        report=None,
        digits=Path(config["digits"]),
    )

    def tell(text: str) -> None:
        if rank == 0:
            with Path(config["log"]).open("a") as file:
                file.write(f"{text}\n")

    with ExitStack() as listeners:
        if rank == 0:
            listeners.enter_context(listening(showing(tell)))
        if options.kill_step is not None and rank == options.kill_rank:
            listeners.enter_context(listening(_die_at(options.kill_step)))
        run(options, store, tell)


def _die_at(step: int) -> Any:
    def strike(event: Event) -> None:
        if isinstance(event, FileStored) and f"/step-{step:010d}-" in f"/{event.key}":
            os.kill(os.getpid(), signal.SIGKILL)

    return strike


class Reader:
    """Reads digits. It needs only the checkpoint that Ray hands out."""

    def __init__(self, ray_checkpoint: Any, width: int) -> None:
        self.model = ResNet18(width).eval()
        checkpoint = ckptstore.ray.resolve(ray_checkpoint)
        checkpoint.load({"model": self.model}, include="model.*", per_rank="skip")
        self.step = checkpoint.step

    def read(self, images: np.ndarray[Any, Any]) -> tuple[int, np.ndarray[Any, Any]]:
        """Return the step of the checkpoint, and the digit in each image."""
        with torch.no_grad():
            return self.step, self.model(torch.from_numpy(images)).argmax(dim=1).numpy()
