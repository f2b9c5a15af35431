"""FSDP2 and torch.distributed.checkpoint, in the folders that torchtitan makes: `step-6/` of `.distcp` files, and
`.metadata`, which rank 0 renames into place when all ranks have written (torchtitan/components/checkpointer/dcp.py)."""

from __future__ import annotations

import os
import time
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from progress import LAST_STEP, SAVE_EVERY_STEPS, Progress, arguments
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import FSDPModule, fully_shard

warnings.simplefilter("ignore")
torch.set_num_threads(1)


def newest(folder: Path) -> Path | None:
    found = {int(path.parent.name.removeprefix("step-")): path.parent for path in folder.glob("step-*/.metadata")}
    return found[max(found)] if found else None


def main() -> None:
    given = arguments()
    progress = Progress(given.losses, given.pause_at)
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    mesh = torch.distributed.init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    fully_shard(model, mesh=mesh)
    assert isinstance(model, FSDPModule)
    model.set_force_sum_reduction_for_comms(True)  # gloo has no average
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    done = 0
    source = newest(given.folder)
    if source is not None:
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments, "step": 0}
        dcp.load(state, checkpoint_id=source)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        done = state["step"]
    for step in range(done + 1, LAST_STEP + 1):
        inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step + rank))
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(given.step_seconds)
        if rank == 0:
            progress.told(step, loss.item())
        if step % SAVE_EVERY_STEPS == 0:
            weights, moments = get_state_dict(model, optimizer)
            state = {"model": weights, "optimizer": moments, "step": step}
            dcp.save(state, checkpoint_id=given.folder / f"step-{step}")
    torch.distributed.barrier()
    os._exit(0)  # gloo's threads now and then abort an interpreter that takes itself apart


if __name__ == "__main__":
    main()
