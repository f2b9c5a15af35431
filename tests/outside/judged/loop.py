"""A training loop: `loop.py OUT [--stock]`. It resumes, saves every second step, and writes its last weights.

With `--stock` it saves as torch's own documentation of distributed checkpoints does: one directory a step, the newest
is taken.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from common import LAST_STEP, SAVE_EVERY_STEPS, arguments
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from ckptstore import open_store


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """One step, whose data depends on its number alone."""
    inputs = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
    optimizer.zero_grad()
    (model(inputs) - inputs.sum(1, keepdim=True)).square().mean().backward()
    optimizer.step()


def stock(out: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    def state() -> dict[str, Any]:
        weights, moments = get_state_dict(model, optimizer)
        return {"model": weights, "optimizer": moments}

    steps = [int(match[1]) for path in out.glob("checkpoint-*") if (match := re.search(r"-(\d+)$", path.name))]
    done = max(steps, default=0)
    if done:
        loaded = state()
        dcp.load(loaded, checkpoint_id=out / f"checkpoint-{done}")
        set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    print(f"resumed from step {done}")
    for step in range(done + 1, LAST_STEP + 1):
        train(model, optimizer, step)
        if step % SAVE_EVERY_STEPS == 0:
            dcp.save(state(), checkpoint_id=out / f"checkpoint-{step}")


def stored(out: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with open_store(out / "store") as store:
        state = {"model": model, "optimizer": optimizer}
        resumed = store.resume(state)
        done = resumed.step if resumed else 0
        print(f"resumed from step {done}")
        for step in range(done + 1, LAST_STEP + 1):
            train(model, optimizer, step)
            if step % SAVE_EVERY_STEPS == 0:
                store.save_async(step, state)


def main() -> None:
    given = arguments()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters())
    (stock if given.stock else stored)(given.out, model, optimizer)
    torch.save(model.state_dict(), given.out / "final.pt")


if __name__ == "__main__":
    main()
