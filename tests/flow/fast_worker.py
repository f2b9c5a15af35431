"""What the ranks of a training with a fast tier do: each is a node, which has a disk of its own."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ckptstore import FastTier, open_store


def train(root: str, steps: int, ends: str) -> tuple[int | None, bool, list[float]]:
    """The step from which it went on, whether that was in the store, and the losses of so many steps more.

    Where it ends "preempted", there is not a second left to bring the last checkpoint into the store.
    """
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Linear(256, 64))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters())
    progress, losses = {"step": 0}, []
    fast = FastTier(f"{root}/node{rank}", node=f"node{rank}", copies=2)
    with open_store(f"{root}/store", fast=fast) as store:
        state = {"model": model, "optimizer": optimizer, "progress": progress}
        resumed = store.resume(state)
        for _ in range(steps):
            progress["step"] += 1
            torch.manual_seed(progress["step"])
            loss = model(torch.randn(8, 64)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            pending = store.save_async(progress["step"], state)
        pending.result()
        if ends == "preempted":
            store._deadline.set(0.0)
    dist.destroy_process_group()
    return (resumed.step if resumed else None), bool(resumed and resumed.number), losses
