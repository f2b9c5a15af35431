"""Hugging Face's Trainer: `hf_trainer.py OUT [--stock] [--folder FOLDER]`. It resumes, saves, and
writes its last weights.

With `--stock` it resumes as its documentation says, from what `get_last_checkpoint` finds in FOLDER.
"""

from __future__ import annotations

import argparse
import os
import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from ckptstore.integrations.transformers import CheckpointStoreCallback

LAST_STEP, SAVE_EVERY_STEPS = 6, 2
warnings.simplefilter("ignore")
torch.set_num_threads(1)


class Tell(TrainerCallback):
    """Says where the training begins."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        print(f"resumed from step {state.global_step}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--stock", action="store_true")
    parser.add_argument("--folder", type=Path)
    given = parser.parse_args()
    folder = given.folder or given.out / "folder"
    torch.manual_seed(0)
    rows = [{"input_ids": row, "labels": row.clone()} for row in torch.randint(0, 32, (40, 12))]
    arguments = TrainingArguments(
        output_dir=str(folder),
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
        newest: Any = get_last_checkpoint(str(folder)) if os.path.isdir(folder) else None
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
        trainer = Trainer(model, arguments, train_dataset=rows, callbacks=callbacks)
        trainer.train(resume_from_checkpoint=newest)
    torch.save(model.state_dict(), given.out / "final.pt")


if __name__ == "__main__":
    main()
