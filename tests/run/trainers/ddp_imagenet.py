"""DistributedDataParallel of two processes that saves as PyTorch's ImageNet example does: the first one writes
`checkpoint.pth.tar` anew after each epoch, and copies it to `model_best.pth.tar` where it is the best so far.

It has no generator in its checkpoint: the input of a step depends on its number and the rank alone.
"""

from __future__ import annotations

import os
import shutil
import time

import torch
import torch.distributed as dist
from progress import LAST_STEP, SAVE_EVERY_STEPS, Progress, arguments
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)


def accuracy(model: torch.nn.Module) -> float:
    """The share of a few fixed rows that the model has right."""
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return ((model(x) - x.sum(1, keepdim=True)).abs() < 0.5).float().mean().item()


def main() -> None:
    given = arguments()
    dist.init_process_group("gloo")
    rank, progress = dist.get_rank(), Progress(given.losses, given.pause_at)
    given.folder.mkdir(parents=True, exist_ok=True)
    path = given.folder / "checkpoint.pth.tar"
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    model = DistributedDataParallel(layers)
    optimizer = torch.optim.SGD(model.parameters(), 0.02, momentum=0.9)
    first, best = 0, 0.0
    if path.is_file():  # --resume checkpoint.pth.tar
        checkpoint = torch.load(path, map_location="cpu")
        first, best = checkpoint["epoch"], checkpoint["best_acc1"]
        model.load_state_dict(checkpoint["state_dict"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        assert (given.folder / "model_best.pth.tar").is_file() == (best > 0)
    for epoch in range(first, LAST_STEP // SAVE_EVERY_STEPS):
        for step in range(epoch * SAVE_EVERY_STEPS + 1, (epoch + 1) * SAVE_EVERY_STEPS + 1):
            x = torch.randn(8, 4, generator=torch.Generator().manual_seed(2 * step + rank))
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(given.step_seconds)
            dist.all_reduce(loss.detach())
            if rank == 0:
                progress.told(step, loss.item())
        is_best, best = accuracy(layers) > best, max(accuracy(layers), best)
        if rank == 0:
            state = {"epoch": epoch + 1, "arch": "mlp", "state_dict": model.state_dict(), "best_acc1": best}
            torch.save(state | {"optimizer": optimizer.state_dict()}, path)
            if is_best:
                shutil.copyfile(path, given.folder / "model_best.pth.tar")
    os._exit(0)  # gloo's threads now and then abort an interpreter that takes itself apart


if __name__ == "__main__":
    main()
