"""Real training in real processes: bit-equal curves after a resume. Layouts in layouts are in `tests/state`."""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from forked_ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from ckptstore import CheckpointStore, open_store


class Net(nn.Module):
    """Two linear layers around a batch norm, and a tied output."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.norm = nn.BatchNorm1d(32)
        self.second = nn.Linear(32, 16)
        self.tied = nn.Linear(32, 16)
        self.tied.weight = self.second.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.norm(self.first(x)))
        return self.second(hidden) + self.tied(hidden)


def build(layout: str, *, seed: int) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    """Model, optimizer and scheduler in a parallel layout over all ranks."""
    torch.manual_seed(seed)
    model: nn.Module = Net()
    size = dist.get_world_size()
    if layout == "ddp":
        model = DistributedDataParallel(model)
    elif layout == "fsdp1":
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    elif layout == "fsdp2":
        fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
    elif layout == "tp":
        plan = {"first": ColwiseParallel(), "second": RowwiseParallel(), "tied": RowwiseParallel()}
        model.norm = nn.Identity()  # a batch norm over a shard is another model
        parallelize_module(model, init_device_mesh("cpu", (size,)), plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


def train(parts: tuple[nn.Module, torch.optim.Optimizer, Any], num_steps: int, *, layout: str) -> list[float]:
    """Train on random data, each rank its own but under tensor parallelism; the losses of this rank."""
    model, optimizer, scheduler = parts
    losses = []
    for _ in range(num_steps):
        x = torch.randn(8, 16)
        if layout == "tp":
            dist.broadcast(x, 0)
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return losses


def state_of(parts: tuple[nn.Module, torch.optim.Optimizer, Any], **values: Any) -> dict[str, Any]:
    """The whole state of a run, random numbers included."""
    model, optimizer, scheduler = parts
    return {"model": model, "optim": optimizer, "scheduler": scheduler, "rng": Random(), **values}


class Random:
    """This rank's random numbers, which differ from rank to rank."""

    def state_dict(self) -> dict[str, Any]:
        return {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": np.random.get_state()[1]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        torch.set_rng_state(state["torch"])
        random.setstate(state["python"])
        full = list(np.random.get_state())
        full[1] = state["numpy"]
        np.random.set_state(tuple(full))


@contextmanager
def job(root: str, **keywords: Any) -> Iterator[CheckpointStore]:
    """A store, in a process group that is initialised once for all that this process does."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    with open_store(root, rank_timeout_seconds=60, **keywords) as store:
        yield store


def seed_rank() -> None:
    """Random numbers of this rank's own."""
    rank = int(os.environ["RANK"])
    torch.manual_seed(1000 + rank)
    random.seed(rank)
    np.random.seed(rank)


def train_and_resume(root: str, layouts: list[str]) -> dict[str, tuple[list[float], list[float], list[float]]]:
    """For each layout: losses of an uninterrupted run, and of one that resumes from sync and async saves in between."""
    found = {}
    for layout in layouts:
        with job(f"{root}/{layout}") as store:
            parts = build(layout, seed=1)
            seed_rank()
            train(parts, 3, layout=layout)
            store.save(3, state_of(parts, epoch=3), metrics={"loss": 1.0})
            whole = train(parts, 2, layout=layout)
            pending = store.save_async(5, state_of(parts, epoch=5))
            whole += train(parts, 3, layout=layout)
            assert pending.result().step == 5
            resumed = []
            for step, skip in ((3, 0), (5, 2)):
                other = build(layout, seed=2)
                state = state_of(other, epoch=0)
                torch.manual_seed(0)
                store[step].load(state)
                assert state["epoch"] == step
                resumed.append(train(other, 5 - skip, layout=layout))
            assert store[3].verify().ok
        found[layout] = (whole, *resumed)
    return found


pytestmark = pytest.mark.timeout(600)


def assert_same_curves(results: list[dict[str, tuple[list[float], list[float], list[float]]]]) -> None:
    for of_rank in results:
        for layout, (whole, from_sync, from_async) in of_rank.items():
            assert from_sync == whole, layout
            assert from_async == whole[2:], layout


@pytest.mark.parametrize("layouts", [["ddp", "fsdp2"], pytest.param(["fsdp1", "tp"], marks=pytest.mark.slow)], ids=str)
def test_training_goes_on_as_if_never_interrupted(tmp_path: Path, layouts: list[str]) -> None:
    results = run_ranks(2, train_and_resume, str(tmp_path), layouts)
    assert set(results[0]) == set(layouts)
    assert_same_curves(results)
    if "ddp" in layouts:
        assert results[0]["ddp"] != results[1]["ddp"]
