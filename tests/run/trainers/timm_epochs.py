"""timm's CheckpointSaver, a step is an epoch: `last.pth.tar`, `checkpoint-N.pth.tar` for the best two, which are other
names of it, and `model_best.pth.tar`. The later epochs are worse by its metric, so that `last.pth.tar` alone has them.

timm needs torchvision, which the index has for GPUs alone: without them its operators are missing, and its import
asks for two of them. They are declared here, and not used.
"""

from __future__ import annotations

import time

import torch
from progress import LAST_STEP, SAVE_EVERY_STEPS, Progress, arguments

torch.set_num_threads(1)
operators = torch.library.Library("torchvision", "DEF")
operators.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
operators.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

import timm  # noqa: E402
from timm.models import resume_checkpoint  # noqa: E402
from timm.utils import CheckpointSaver  # noqa: E402


def main() -> None:
    given = arguments()
    given.folder.mkdir(parents=True, exist_ok=True)
    progress = Progress(given.losses, given.pause_at)
    torch.manual_seed(0)
    model = timm.create_model("test_resnet", num_classes=2, drop_rate=0.2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    saver = CheckpointSaver(model, optimizer, checkpoint_dir=str(given.folder), max_history=2)
    last, first = given.folder / "last.pth.tar", 1
    if last.exists():  # --resume last.pth.tar
        first = resume_checkpoint(model, str(last), optimizer) or 1
        saver.load_state_dict_from_checkpoint(str(last))
    for step in range(first, LAST_STEP + 1):
        torch.manual_seed(step)  # it has no generator in its checkpoint
        images = torch.randn(4, 3, 32, 32)
        classes = (images.mean(dim=(1, 2, 3)) > 0).long()
        loss = torch.nn.functional.cross_entropy(model(images), classes)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(given.step_seconds)
        progress.told(step, loss.item())
        if step % SAVE_EVERY_STEPS == 0:
            saver.save_checkpoint(step, metric=1 / step)


if __name__ == "__main__":
    main()
