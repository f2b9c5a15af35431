"""Ranks with a module of their own under a key of their own, as stages of a pipeline have them: no names collide."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from forked_ranks import run_ranks

pytestmark = pytest.mark.slow


def make(stages: list[int]) -> dict[str, Any]:
    import torch

    modules = {}
    for stage in stages:
        torch.manual_seed(stage)
        modules[f"stage{stage}"] = torch.nn.Linear(3, 3)
    parameters = [parameter for module in modules.values() for parameter in module.parameters()]
    return {**modules, "optimizer": torch.optim.AdamW(parameters, lr=0.1)}


def step(state: dict[str, Any]) -> dict[str, Any]:
    import torch

    optimizer = state["optimizer"]
    modules = {name: item for name, item in state.items() if name != "optimizer"}
    optimizer.zero_grad()
    for module in modules.values():
        module(torch.linspace(0, 1, 3)).square().sum().backward()
    optimizer.step()
    return {name: [parameter.tolist() for parameter in module.parameters()] for name, module in modules.items()}


def save(directory: Path) -> dict[str, Any]:
    import torch

    import ckptstore

    torch.distributed.init_process_group("gloo")
    state = make([torch.distributed.get_rank()])
    step(state)
    with ckptstore.open_store(directory, durable=False) as store:
        store.save(0, state)
    return step(state)


def load(directory: Path) -> dict[str, Any]:
    import torch

    import ckptstore

    torch.distributed.init_process_group("gloo")
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    state = make(list(range(rank, 2, world_size)))
    with ckptstore.open_store(directory, durable=False) as store:
        store.load(state)
    return step(state)


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.long)])
def test_stages_are_loaded_by_one_rank_and_by_as_many(world_size: int, tmp_path: Path) -> None:
    wanted = {name: found for rank in run_ranks(2, save, tmp_path) for name, found in rank.items()}
    loaded = {name: found for rank in run_ranks(world_size, load, tmp_path) for name, found in rank.items()}
    assert loaded == wanted
