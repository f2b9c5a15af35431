"""ZeroRedundancyOptimizer: each rank stores its part of the state by name, and any number of ranks loads it."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
from forked_ranks import run_ranks

pytestmark = pytest.mark.slow


def make() -> Any:
    import torch
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3), torch.nn.Linear(3, 4))
    model = DistributedDataParallel(layers)
    return model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)


def step(model: Any, optimizer: Any) -> list[Any]:
    import torch

    optimizer.zero_grad()
    model(torch.linspace(0, 1, 10).reshape(2, 5)).square().sum().backward()
    optimizer.step()
    return [parameter.tolist() for parameter in model.parameters()]


def save(directory: Path) -> list[Any]:
    import ckptstore

    model, optimizer = make()
    step(model, optimizer)
    optimizer.param_groups[0]["lr"] = 0.05
    with ckptstore.open_store(directory, durable=False) as store:
        store.save(0, {"model": model, "optimizer": optimizer})
    return step(model, optimizer)


def load(directory: Path) -> list[Any]:
    import ckptstore

    model, optimizer = make()
    with ckptstore.open_store(directory, durable=False) as store:
        store.load({"model": model, "optimizer": optimizer})
    assert optimizer.param_groups[0]["lr"] == optimizer.optim.param_groups[0]["lr"] == 0.05
    return step(model, optimizer)


@pytest.mark.parametrize(
    "world_size", [pytest.param(1, marks=pytest.mark.long), 2, pytest.param(4, marks=pytest.mark.long)]
)  # powers of two: the mean of equal gradients is exact
def test_the_next_step_is_the_same_on_any_number_of_ranks(world_size: int, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ends = run_ranks(2, save, tmp_path / "store")
        assert run_ranks(world_size, load, tmp_path / "store") == [ends[0]] * world_size
