"""What the processes of the state flows run: real training of small models under DDP, FSDP2 and tensor parallelism."""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
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
    elif layout == "hsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("replicate", "shard")))
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


def full_parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter whole, by its plain name."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    if isinstance(model, FullyShardedDataParallel):  # torch 2.13 crashes on its whole state dict with tied weights
        with FullyShardedDataParallel.summon_full_params(model):
            names = {name.replace("_fsdp_wrapped_module.", ""): item for name, item in model.named_parameters()}
            return {name: item.detach().clone() for name, item in names.items()}
    found = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    return {name: item for name, item in found.items() if isinstance(item, torch.Tensor) and "norm.running" not in name}


def save_as(root: str, layout: str) -> Any:
    """Save a trained state in a layout; the whole parameters and one whole optimizer state as rank 0 sees them."""
    with job(root) as store:
        parts = build(layout, seed=1)
        seed_rank()
        train(parts, 2, layout=layout)
        store.save(2, state_of(parts, epoch=2))
        return full_parameters(parts[0])


def load_as(
    root: str, layouts: list[str], read_once: list[str], expected: dict[str, torch.Tensor]
) -> dict[str, list[str]]:
    """Load into other layouts; for each the names of parameters that are not bit-equal."""
    found = {}
    for layout, how in zip(layouts, read_once, strict=False):
        with job(root) as store:
            parts = build(layout, seed=7)
            checkpoint = store.load(state_of(parts, epoch=0), per_rank="first", read_once=how)
            assert checkpoint is not None
            parameters = full_parameters(parts[0])
            assert all(len(state) for state in parts[1].state.values())
            both = parameters.keys() & expected.keys()  # FSDP1 shows no buffers, and tied weights once
            assert len(both) >= 7 or dist.get_rank() > 0  # torch gives the whole state to rank 0 alone
            found[layout] = [name for name in both if not torch.equal(parameters[name], expected[name])]
    return found


def split_bytes(root: str) -> float:
    """The share of the bytes of one large DDP parameter that this rank writes."""
    with job(root) as store:
        model = DistributedDataParallel(nn.Linear(2048, 2048, bias=False))
        checkpoint = store.save(1, {"model": model})
        assert checkpoint.verify().ok
        mine = sum(
            item.size_bytes for item in checkpoint.files if item.name.endswith(f"rank={dist.get_rank():05d}-00.distcp")
        )
        return mine / (2048 * 2048 * 4)


def same_key_other_value(root: str) -> bool:
    """Whether values and small tensors that differ between ranks come back to each."""
    with job(root) as store:
        rank = dist.get_rank()
        checkpoint = store.save(1, {"position": 10 + rank, "same": 5, "tensor": torch.full((3,), float(rank))})
        assert checkpoint.per_rank("position") == [10, 11]
        assert checkpoint.per_rank("same") == [5]
        loaded: dict[str, Any] = {"position": -1, "same": -1, "tensor": torch.full((3,), -1.0)}
        store[1].load(loaded)
        return loaded["position"] == 10 + rank and loaded["tensor"].tolist() == [rank] * 3 and loaded["same"] == 5


def loader_positions(root: str) -> tuple[list[int], list[int], list[int]]:
    """Samples before a save, after a resume in a new loader, and those of an uninterrupted run."""
    from torch.utils.data.distributed import DistributedSampler
    from torchdata.stateful_dataloader import StatefulDataLoader

    def loader() -> Any:
        data = list(range(64))
        sampler = DistributedSampler(data, shuffle=True, seed=3)
        return StatefulDataLoader(data, batch_size=4, sampler=sampler)

    with job(root) as store:
        due = [sample for batch in loader() for sample in batch.tolist()]
        first, batches, before = loader(), None, []
        batches = iter(first)
        for _ in range(3 + dist.get_rank()):  # ranks may be at different places
            before += next(batches).tolist()
        store.save(1, {"loader": first})
        second = loader()
        store.resume({"loader": second})
        after = [sample for batch in second for sample in batch.tolist()]
        return before, after, due


def shares_values_and_samples(root: str) -> tuple[float, bool, tuple[list[int], list[int], list[int]]]:
    """Three of the above, in one process for each rank."""
    return (
        split_bytes(f"{root}/split"),
        same_key_other_value(f"{root}/values"),
        loader_positions(f"{root}/loader"),
    )
