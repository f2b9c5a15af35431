"""Hugging Face's Trainer: `hf_trainer.py OUT [--stock]`. It resumes, saves, and
writes its last weights.

With `--stock` it resumes as its documentation says, from what `get_last_checkpoint` finds in OUT/folder.
"""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch
from common import LAST_STEP, SAVE_EVERY_STEPS, arguments
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from ckptstore.integrations.transformers import CheckpointStoreCallback

warnings.simplefilter("ignore")
torch.set_num_threads(1)


class Tell(TrainerCallback):
    """Says where the training begins."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        print(f"resumed from step {state.global_step}")


def main() -> None:
    given = arguments()
    torch.manual_seed(0)
    rows = [{"input_ids": row, "labels": row.clone()} for row in torch.randint(0, 32, (40, 12))]
    options = TrainingArguments(
        output_dir=str(given.folder),
        use_cpu=True,
        per_device_train_batch_size=4,
        max_steps=LAST_STEP,
        save_steps=SAVE_EVERY_STEPS,
        logging_strategy="no",
        seed=5,
        report_to=[],
        disable_tqdm=True,
    )
    model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2))
    callbacks: list[TrainerCallback] = [Tell()]
    if given.stock:
        newest: Any = get_last_checkpoint(str(given.folder)) if os.path.isdir(given.folder) else None
        done = int(newest.rpartition("-")[2]) if newest else 0
    else:
        callback = CheckpointStoreCallback(given.out / "store")
        newest = callback.resume()
        done = callback.resumed.step if callback.resumed else 0
        callbacks.append(callback)
    if done >= LAST_STEP:  # Trainer would take one more step
        print(f"resumed from step {LAST_STEP}")
        model = GPT2LMHeadModel.from_pretrained(newest)
    else:
        trainer = Trainer(model, options, train_dataset=rows, callbacks=callbacks)
        trainer.train(resume_from_checkpoint=newest)
    torch.save(model.state_dict(), given.out / "final.pt")


if __name__ == "__main__":
    main()
