"""DeepSpeed's engine with ZeRO 1: `global_step6/` of every rank's files, then `latest`, which names it."""

from __future__ import annotations

import os
import time
import warnings

import deepspeed
import torch
from progress import LAST_STEP, SAVE_EVERY_STEPS, Progress, arguments

warnings.simplefilter("ignore")
torch.set_num_threads(1)


def main() -> None:
    given = arguments()
    progress = Progress(given.losses, given.pause_at)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled, for a minute
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
    rank = torch.distributed.get_rank()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10_000,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    engine.load_checkpoint(str(given.folder))  # what `latest` names, or nothing and a warning
    for step in range(engine.global_steps + 1, LAST_STEP + 1):
        inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step + rank))
        loss = (engine(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        engine.backward(loss)
        engine.step()
        time.sleep(given.step_seconds)
        if rank == 0:
            progress.told(step, loss.item())
        if step % SAVE_EVERY_STEPS == 0:
            engine.save_checkpoint(str(given.folder))
    os._exit(0)  # gloo's threads now and then abort an interpreter that takes itself apart


if __name__ == "__main__":
    main()
