"""Hugging Face's Trainer on a tiny GPT with dropout; `--mode fsdp` shards it, `--mode sft` is TRL's SFTTrainer."""

from __future__ import annotations

import os
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from progress import LAST_STEP, SAVE_EVERY_STEPS, Progress, arguments
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

warnings.simplefilter("ignore")
torch.set_num_threads(1)


class Tell(TrainerCallback):
    """Tells the loss of each step."""

    def __init__(self, progress: Progress, step_seconds: float) -> None:
        self.progress, self.step_seconds = progress, step_seconds

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if state.is_world_process_zero and "loss" in logs:
            time.sleep(self.step_seconds)
            self.progress.told(state.global_step, logs["loss"])


def rows() -> list[dict[str, torch.Tensor]]:
    """Token sequences that follow a rule."""
    numbers = torch.Generator().manual_seed(1)
    starts = torch.randint(0, 32, (40,), generator=numbers)
    return [{"input_ids": row, "labels": row.clone()} for row in ((start + torch.arange(12)) % 32 for start in starts)]


def model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2))


def options(folder: Path, mode: str) -> dict[str, Any]:
    chosen: dict[str, Any] = {
        "output_dir": str(folder),
        "use_cpu": True,
        "per_device_train_batch_size": 4,
        "max_steps": LAST_STEP,
        "learning_rate": 5e-3,
        "save_steps": SAVE_EVERY_STEPS,
        "save_total_limit": 2,
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "seed": 5,
        "report_to": [],
        "disable_tqdm": True,
    }
    if mode == "fsdp":
        chosen["fsdp"] = True
        chosen["fsdp_config"] = {"state_dict_type": "SHARDED_STATE_DICT", "transformer_layer_cls_to_wrap": "GPT2Block"}
    return chosen


def sft_trainer(folder: Path, tell: Tell) -> Trainer:
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    words = {"<pad>": 0, "<end>": 1, **{f"w{number}": number + 2 for number in range(30)}}
    plain = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>", eos_token="<end>")
    texts = [" ".join(f"w{(start + number) % 30}" for number in range(10)) for start in range(40)]
    return SFTTrainer(
        model(),
        SFTConfig(**options(folder, "sft"), max_length=16, bf16=False, gradient_checkpointing=False),
        train_dataset=Dataset.from_dict({"text": texts}),
        processing_class=tokenizer,
        callbacks=[tell],
    )


def main() -> None:
    given = arguments()
    tell = Tell(Progress(given.losses, given.pause_at), given.step_seconds)
    if given.mode == "sft":
        trainer = sft_trainer(given.folder, tell)
    else:
        chosen = TrainingArguments(**options(given.folder, given.mode))
        trainer = Trainer(model(), chosen, train_dataset=rows(), callbacks=[tell])
    has_checkpoint = os.path.isdir(given.folder) and get_last_checkpoint(given.folder) is not None
    trainer.train(resume_from_checkpoint=has_checkpoint)
    os._exit(0)  # gloo's threads now and then abort an interpreter that takes itself apart


if __name__ == "__main__":
    main()
