"""DDP: each rank stores a part of the model. `torchrun --nproc-per-node 2 examples/ddp.py STORE`"""

import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ckptstore

dist.init_process_group("gloo")  # "nccl" with GPUs
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(8, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
state = {"model": model, "optimizer": optimizer, "epoch": -1}
with ckptstore.open_store(sys.argv[1]) as store:  # all ranks make the same calls
    store.resume(state)
    first = state["epoch"] + 1
    for epoch in range(first, first + 2):
        optimizer.zero_grad()
        loss = model(torch.full((8,), 1.0 + dist.get_rank())).square().sum()
        loss.backward()
        optimizer.step()
        state["epoch"] = epoch
        checkpoint = store.save(epoch, state, metrics={"loss": loss.item()})
if dist.get_rank() == 0:
    print(f"began with epoch {first}, saved {checkpoint.step} with {checkpoint.world_size} ranks")
dist.destroy_process_group()
