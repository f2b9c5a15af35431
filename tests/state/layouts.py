"""The same small model under every parallel layout, and steps of its training; for the ranks of several tests."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

SIZES = (6, 8, 7)


class Block(nn.Module):
    """Two layers with a norm, whose sizes do not divide by every number of ranks."""

    def __init__(self, sizes: tuple[int, int, int] = SIZES) -> None:
        super().__init__()
        first, hidden, last = sizes
        self.up = nn.Linear(first, hidden)
        self.norm = nn.BatchNorm1d(hidden)
        self.down = nn.Linear(hidden, last)
        self.register_buffer("scale", torch.ones(last))
        self.register_buffer("cache", torch.ones(2), persistent=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.norm(self.up(inputs)))) * self.scale


class Model(nn.Module):
    """A block and a layer tied to another one."""

    def __init__(self, sizes: tuple[int, int, int] = SIZES) -> None:
        super().__init__()
        self.block = Block(sizes)
        self.first = nn.Linear(sizes[2], sizes[2], bias=False)
        self.last = nn.Linear(sizes[2], sizes[2], bias=False)
        self.last.weight = self.first.weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.first(self.block(inputs))))


def start() -> int:
    """Join the group of the ranks, and return the rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    return int(os.environ["RANK"])


def finish() -> None:
    dist.barrier()
    dist.destroy_process_group()


def _ddp(model: Model) -> nn.Module:
    return DistributedDataParallel(model)


def _fsdp1(
    model: Model, *, use_orig_params: bool, strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD
) -> nn.Module:
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        use_orig_params=use_orig_params,
        device_id=torch.device("cpu"),
        sharding_strategy=strategy,
    )


def _fsdp1_hybrid(model: Model) -> nn.Module:
    return FullyShardedDataParallel(
        model,
        device_mesh=init_device_mesh("cpu", (2, 2)),
        use_orig_params=True,
        device_id=torch.device("cpu"),
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
    )


def _fsdp2(model: Model) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model.block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _hsdp2(model: Model) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    fully_shard(model.block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


PLAN = {
    "block.up": ColwiseParallel(output_layouts=Replicate()),
    "block.down": RowwiseParallel(input_layouts=Replicate()),
}


def _tensor_parallel(model: Model) -> nn.Module:
    return parallelize_module(model, init_device_mesh("cpu", (dist.get_world_size(),)), PLAN)


def _tensor_parallel_fsdp2(model: Model) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    parallelize_module(model, mesh["tensor"], PLAN)
    fully_shard(model.block, mesh=mesh["data"])
    return fully_shard(model, mesh=mesh["data"])


def _compiled_checkpointed_fsdp2(model: Model) -> nn.Module:
    model.block.down = checkpoint_wrapper(model.block.down)  # type: ignore[assignment]
    sharded = _fsdp2(model)
    return torch.compile(sharded, backend="eager")  # type: ignore[return-value]


LAYOUTS: dict[str, Callable[[Model], nn.Module]] = {
    "plain": lambda model: model,
    "ddp": _ddp,
    "fsdp1": functools.partial(_fsdp1, use_orig_params=True),
    "fsdp1-flat": functools.partial(_fsdp1, use_orig_params=False),
    "fsdp2": _fsdp2,
    "fsdp2-wrapped": _compiled_checkpointed_fsdp2,
    "tensor-parallel": _tensor_parallel,
    "fsdp1-hybrid": _fsdp1_hybrid,
    "hsdp2": _hsdp2,
    "tensor-parallel-fsdp2": _tensor_parallel_fsdp2,
}
BATCHES: dict[str, Callable[[int], int]] = {
    "plain": lambda rank: 0,
    "tensor-parallel": lambda rank: 0,
    "tensor-parallel-fsdp2": lambda rank: rank // 2,
}
"""Which batch a rank sees, where it is not its own: ranks that share the work on one model see the same."""


class Run:
    """A model under a layout, its optimizer and scheduler."""

    def __init__(self, layout: str, make: Callable[[Any], torch.optim.Optimizer] | None = None) -> None:
        torch.manual_seed(1)
        self.layout = layout
        self.model = LAYOUTS[layout](Model())
        self.optimizer = make(self.model.parameters()) if make else torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, gamma=0.5)
        torch.manual_seed(100 + BATCHES.get(layout, int)(dist.get_rank()))

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optim": self.optimizer, "sched": self.scheduler}

    def steps(self, count: int) -> list[Any]:
        """Train, and return what was seen: losses and, in the end, this rank's part of everything."""
        seen: list[Any] = []
        model = getattr(self.model, "_orig_mod", self.model)  # as compiled with the eager backend, but quickly
        for _ in range(count):
            self.optimizer.zero_grad()
            loss = model(torch.randn(4, SIZES[0])).square().mean()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            seen.append(loss.item())
        return seen


def full(tensor: Any) -> torch.Tensor:
    """The whole of a tensor, collectively: plain, DTensor or ShardedTensor."""
    if isinstance(tensor, DTensor):
        return tensor.full_tensor().detach().clone()
    if hasattr(tensor, "local_shards"):
        whole = torch.zeros(tensor.size(), dtype=tensor.dtype) if dist.get_rank() == 0 else None
        tensor.gather(0, out=whole)
        found = [whole]
        dist.broadcast_object_list(found, 0)
        assert found[0] is not None
        return found[0]
    return tensor.detach().clone()
