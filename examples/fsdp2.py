"""FSDP2: no rank has the whole model, and another run may have more ranks or fewer.

`torchrun --nproc-per-node 2 examples/fsdp2.py STORE`, then the same with `--nproc-per-node 1` or 3.
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ckptstore

dist.init_process_group("gloo")  # "nccl" with GPUs, and "cuda" below
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
for part in (*model, model):
    fully_shard(part, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
state = {"model": model, "optimizer": optimizer, "epoch": -1}
with ckptstore.open_store(sys.argv[1]) as store:
    found = store.resume(state)
    if found and dist.get_rank() == 0:
        print(f"{found.world_size} ranks saved epoch {found.step}, {dist.get_world_size()} loaded it")
    epoch = state["epoch"] = state["epoch"] + 1
    loss = model(torch.ones(4, 8)).square().sum()
    loss.backward()
    optimizer.step()
    store.save(epoch, state, metrics={"loss": loss.item()})
dist.destroy_process_group()
