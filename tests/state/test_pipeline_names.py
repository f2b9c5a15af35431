"""Ranks with a module of their own under a key of their own, as stages of a pipeline have them: no names collide."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from meshes import new_uri
from thread_ranks import run_threads

import ckptstore

pytestmark = pytest.mark.slow


def make(stages: list[int]) -> dict[str, Any]:
    modules = {f"stage{stage}": torch.nn.Linear(3, 3) for stage in stages}
    parameters = [parameter for module in modules.values() for parameter in module.parameters()]
    return {**modules, "optimizer": torch.optim.AdamW(parameters, lr=0.1)}


def step(state: dict[str, Any]) -> dict[str, Any]:
    optimizer = state["optimizer"]
    modules = {name: item for name, item in state.items() if name != "optimizer"}
    optimizer.zero_grad()
    for module in modules.values():
        module(torch.linspace(0, 1, 3)).square().sum().backward()
    optimizer.step()
    return {name: [parameter.tolist() for parameter in module.parameters()] for name, module in modules.items()}


@pytest.mark.parametrize("world_size", [1, 2])
def test_stages_are_loaded_by_one_rank_and_by_as_many(world_size: int) -> None:
    uri, states = new_uri(), [make([rank]) for rank in range(2)]

    def save(store: ckptstore.CheckpointStore, rank: int) -> dict[str, Any]:
        step(states[rank])
        store.save(0, states[rank])
        return step(states[rank])

    def load(store: ckptstore.CheckpointStore, rank: int) -> dict[str, Any]:
        state = make(list(range(rank, 2, world_size)))
        store.load(state)
        return step(state)

    wanted = {name: found for rank in run_threads(2, uri, save) for name, found in rank.items()}
    assert {name: found for rank in run_threads(world_size, uri, load) for name, found in rank.items()} == wanted
