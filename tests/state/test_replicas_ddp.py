"""Replicas that have come apart in real trainings: local SGD, unsynchronised gradients, buffers, hybrid sharding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from forked_ranks import run_ranks

pytestmark = pytest.mark.slow

RANKS = 2


def attempt(directory: Path, name: str, state: Any) -> tuple[str, tuple[int, ...]]:
    """What becomes of a first save: nothing is in the store where it is refused."""
    import ckptstore

    with ckptstore.open_store(directory / name, durable=False) as store:
        try:
            store.save(1, state)
        except ckptstore.InvalidState as error:
            assert not list(store)
            assert not [
                path for path in (directory / name).rglob("*") if "checkpoints" in path.parts and path.is_file()
            ]
            return str(error), error.ranks
        return "", ()


def made(**options: Any) -> tuple[Any, Any]:
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 512), nn.BatchNorm1d(512), nn.Linear(512, 600))
    model = DistributedDataParallel(net, **options)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def step(model: Any, optimizer: Any, rank: int, *, number: int = 0) -> None:
    import torch

    torch.manual_seed(100 * number + rank)
    optimizer.zero_grad()
    model(torch.randn(8, 16)).square().mean().backward()
    optimizer.step()


def in_ranks(directory: Path) -> dict[str, Any]:
    import layouts as given
    import torch
    import torch.distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook

    import ckptstore
    from ckptstore.state import per_rank

    rank = given.start()
    found: dict[str, Any] = {}

    model, optimizer = made()
    for number in range(3):
        step(model, optimizer, rank, number=number)
    found["in step"] = attempt(directory, "in step", {"m": model, "o": optimizer})

    with model.no_sync():
        step(model, optimizer, rank)
    found["no_sync"] = attempt(directory, "no_sync", {"m": model, "o": optimizer})
    found["no_sync kept apart"] = attempt(directory, "apart", {"m": per_rank(model), "o": per_rank(optimizer)})
    with torch.no_grad():
        for parameter in model.parameters():  # as DiLoCo does: the weights are averaged, the momentum is not
            dist.all_reduce(parameter)
    found["only momentum"] = attempt(directory, "momentum", {"m": model, "o": optimizer})
    found["only the model"] = attempt(directory, "model", {"m": model})
    found["optimizer apart"] = attempt(directory, "optimizer", {"m": model, "o": per_rank(optimizer)})

    model, optimizer = made()
    own = [dist.new_group([one]) for one in range(RANKS)][rank]
    hook_state = PostLocalSGDState(process_group=None, subgroup=own, start_localSGD_iter=0)
    model.register_comm_hook(hook_state, post_localSGD_hook)
    step(model, optimizer, rank)
    found["local SGD"] = attempt(directory, "local", {"m": model, "o": optimizer})

    for broadcast in (True, False):
        model, optimizer = made(broadcast_buffers=broadcast)
        step(model, optimizer, rank)
        name = f"buffers broadcast {broadcast}"
        found[name] = attempt(directory, name, {"m": model, "o": optimizer})
        running = model.module[1].running_mean.clone()
        torch.nn.init.zeros_(model.module[1].running_mean)
        with ckptstore.open_store(directory / name) as store:
            store.load({"m": model, "o": optimizer})
        if broadcast:  # the leader's counts, which the next step would broadcast
            dist.broadcast(running, 0)
        assert torch.equal(model.module[1].running_mean, running)
    with torch.no_grad():
        model.module[2].weight[-1, -1] += rank
    found["one number"] = attempt(directory, "one", {"m": model, "o": optimizer})

    dist.barrier()
    given.finish()
    return found


def test_trainings_that_have_come_apart_are_refused_and_others_saved(tmp_path: Path) -> None:
    found = run_ranks(RANKS, in_ranks, tmp_path, timeout_seconds=200)
    assert found[0] == found[1]
    outcome = {name: message for name, (message, _) in found[0].items()}
    for name in (
        "in step", "no_sync kept apart", "only the model", "optimizer apart",
        "buffers broadcast True", "buffers broadcast False",
    ):  # fmt: skip
        assert outcome.pop(name) == "", name
    assert "m.0.weight (rank 0 vs rank 1)" in outcome["no_sync"]
    assert "m.0.weight (rank 0 vs rank 1)" in outcome["local SGD"]
    assert "o.state.m.0.weight.momentum_buffer (rank 0 vs rank 1)" in outcome["only momentum"]
    assert " m." not in outcome["only momentum"]
    assert "A tensor differs" in outcome["one number"]
    assert "m.2.weight (rank 0 vs rank 1)" in outcome["one number"]
    assert all("per_rank" in message for message in outcome.values())
    assert {ranks for name, (_, ranks) in found[0].items() if name in outcome} == {(0, 1)}
