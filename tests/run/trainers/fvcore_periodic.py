"""detectron2's checkpoints are those of fvcore: PeriodicCheckpointer writes `model_0000002.pth`, then `last_checkpoint`
with its name, and at the end the same once more as `model_final.pth`."""

from __future__ import annotations

import time

import torch
from fvcore.common.checkpoint import Checkpointer, PeriodicCheckpointer
from progress import LAST_STEP, SAVE_EVERY_STEPS, Progress, arguments

torch.set_num_threads(1)


def main() -> None:
    given = arguments()
    progress = Progress(given.losses, given.pause_at)
    given.folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.Dropout(0.2), torch.nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
    checkpointer = Checkpointer(model, str(given.folder), optimizer=optimizer, scheduler=schedule)
    periodic = PeriodicCheckpointer(checkpointer, SAVE_EVERY_STEPS, max_iter=LAST_STEP, max_to_keep=2)
    begins_at = checkpointer.resume_or_load("", resume=True).get("iteration", -1) + 1
    for iteration in range(begins_at, LAST_STEP):
        torch.manual_seed(iteration)  # it has no generator in its checkpoint
        x = torch.randn(8, 4)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        time.sleep(given.step_seconds)
        progress.told(iteration + 1, loss.item())
        periodic.step(iteration)


if __name__ == "__main__":
    main()
