"""A script like nanoGPT's train.py: one `ckpt.pt` that each save overwrites, with `iter_num` in it."""

from __future__ import annotations

import time

import torch
from progress import LAST_STEP, SAVE_EVERY_STEPS, Progress, arguments

torch.set_num_threads(1)


def main() -> None:
    given = arguments()
    progress = Progress(given.losses, given.pause_at)
    given.folder.mkdir(parents=True, exist_ok=True)
    path = given.folder / "ckpt.pt"
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.Dropout(0.2), torch.nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    done = 0
    if path.exists():  # init_from = "resume"
        checkpoint = torch.load(path, weights_only=False)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        done = checkpoint["iter_num"]
    for step in range(done + 1, LAST_STEP + 1):
        torch.manual_seed(step)  # it has no generator in its checkpoint
        x = torch.randn(8, 4)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        time.sleep(given.step_seconds)
        progress.told(step, loss.item())
        if step % SAVE_EVERY_STEPS == 0:
            checkpoint = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "model_args": {"n_layer": 2},
                "iter_num": step,
                "best_val_loss": loss.detach(),
            }
            torch.save(checkpoint, path)


if __name__ == "__main__":
    main()
