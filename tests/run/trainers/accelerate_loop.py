"""A loop of accelerate with automatic naming and `total_limit`, as its examples have it."""

from __future__ import annotations

import time

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from progress import LAST_STEP, SAVE_EVERY_STEPS, Progress, arguments

torch.set_num_threads(1)


def main() -> None:
    given = arguments()
    progress = Progress(given.losses, given.pause_at)
    naming = ProjectConfiguration(project_dir=str(given.folder), automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(cpu=True, project_config=naming)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.Dropout(0.2), torch.nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    saved = sorted(given.folder.glob("checkpoints/checkpoint_*"), key=lambda path: int(path.name.split("_")[1]))
    done = 0
    if saved:
        accelerator.load_state()  # the newest of automatic naming
        number = int(saved[-1].name.split("_")[1])
        done = (number + 1) * SAVE_EVERY_STEPS
        accelerator.project_configuration.iteration = number + 1
    for step in range(done + 1, LAST_STEP + 1):
        x = torch.randn(8, 4)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        time.sleep(given.step_seconds)
        progress.told(step, loss.item())
        if step % SAVE_EVERY_STEPS == 0:
            accelerator.save_state()


if __name__ == "__main__":
    main()
