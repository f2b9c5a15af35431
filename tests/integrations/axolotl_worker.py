"""What test_axolotl.py runs in processes of its own: Axolotl's plugin manager, and a real Trainer."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from axolotl.integrations.base import PluginManager
from axolotl.integrations.config import merge_input_args
from axolotl.utils.dict import DictDefault
from axolotl.utils.train import determine_last_checkpoint
from pydantic import ValidationError
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from transformers_worker import QUIET, Notes, texts

from ckptstore.errors import InvalidInput

PLUGIN = "ckptstore.integrations.axolotl.CkptstorePlugin"


def train(given: dict[str, Any], *, kill_at: int | None, seed: int) -> dict[str, Any]:
    """What Axolotl's `train` does with its plugins, in its order, around a Trainer of transformers."""
    manager = PluginManager.get_instance()
    manager.register(PLUGIN)
    assert list(manager.plugins) == [PLUGIN]  # what fails to load is left out with a message alone
    cfg = DictDefault(given)
    torch.manual_seed(seed)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2))
    callbacks = manager.add_callbacks_pre_trainer(cfg=cfg, model=model)
    arguments = TrainingArguments(output_dir=cfg.output_dir, max_steps=9, save_steps=3, **QUIET)
    trainer = Trainer(model, arguments, train_dataset=texts(1, 40), callbacks=[*callbacks, Notes(kill_at)])
    manager.post_trainer_create(cfg, trainer)
    resumed = determine_last_checkpoint(cfg)
    trainer.train(resume_from_checkpoint=resumed)
    losses = {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}
    return {"resumed": bool(resumed), "losses": losses}


def refused(keys: dict[str, Any], configs: list[dict[str, Any]]) -> list[str]:
    """Why these keys are refused by the model that Axolotl joins with its own, and each configuration by the plugin."""
    manager = PluginManager.get_instance()
    manager.register(PLUGIN)
    _, model = merge_input_args()
    found = []
    try:
        model.model_validate(keys)
    except ValidationError as error:
        found += [text["msg"] for text in error.errors()]
    for given in configs:
        try:
            manager.add_callbacks_pre_trainer(cfg=DictDefault(given), model=None)
        except InvalidInput as error:
            found.append(str(error))
    return found


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    function = {"train": train, "refused": refused}[asked.pop("do")]
    print(json.dumps(function(**asked)))
