"""An engine of ignite with its own Checkpoint and DiskSaver, which keep two files: `checkpoint_6.pt`, or with
`--mode best` those of the lowest losses, `best_checkpoint_6_neg_loss=-0.3056.pt`.

It has no generator in its checkpoints: the input of a step depends on its number alone.
"""

from __future__ import annotations

import re
import time
from typing import Any

import torch
from ignite.engine import Engine, Events
from ignite.handlers import Checkpoint, DiskSaver, global_step_from_engine
from progress import LAST_STEP, SAVE_EVERY_STEPS, Progress, arguments

torch.set_num_threads(1)


def main() -> None:
    given = arguments()
    progress = Progress(given.losses, given.pause_at)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.Dropout(0.2), torch.nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def update(engine: Engine, _batch: Any) -> float:
        step = engine.state.iteration
        torch.manual_seed(step)
        x = torch.randn(8, 4)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(given.step_seconds)
        progress.told(step, loss.item())
        return loss.item()

    def neg_loss(_engine: Engine) -> float:
        inputs = torch.randn(256, 4, generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            return -(model.eval()(inputs) - inputs.sum(1, keepdim=True)).square().mean().item()

    trainer = Engine(update)
    trainer.add_event_handler(Events.ITERATION_STARTED, lambda: model.train())
    to_save = {"trainer": trainer, "model": model, "optimizer": optimizer}
    best: dict[str, Any] = {"filename_prefix": "best", "score_name": "neg_loss", "score_function": neg_loss}
    saver = Checkpoint(
        to_save,
        DiskSaver(given.folder, require_empty=False),
        n_saved=2,
        global_step_transform=global_step_from_engine(trainer, Events.ITERATION_COMPLETED),
        **(best if given.mode == "best" else {}),
    )
    trainer.add_event_handler(Events.ITERATION_COMPLETED(every=SAVE_EVERY_STEPS), saver)
    saved = {
        int(match[1]): path for path in given.folder.glob("*.pt") if (match := re.search(r"_(\d+)[_.]", path.name))
    }
    if saved:
        Checkpoint.load_objects(to_load=to_save, checkpoint=torch.load(saved[max(saved)]))
    trainer.run([0] * LAST_STEP, max_epochs=1)


if __name__ == "__main__":
    main()
