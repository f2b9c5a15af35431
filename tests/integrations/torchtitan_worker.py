"""Trainings of torchtitan's debug model, for ranks that are started by the tests."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torchtitan.config import ConfigManager
from torchtitan_on_cpu import CheckpointManager, CkptstoreCheckpointManager, config_of, trainer_of

from ckptstore.errors import CkptstoreError

MANAGERS = {"ours": CkptstoreCheckpointManager, "theirs": CheckpointManager}
CHECKPOINT = {"enable": True, "interval": 2, "last_save_model_only": False}


def train(folder: str, checkpoint: dict[str, Any], how: dict[str, Any]) -> dict[str, Any]:
    """One training; the loss of each step, or what it was refused with. Killed once the loss of a step is known."""
    return _train(folder, checkpoint, **how)


def _train(
    folder: str,
    checkpoint: dict[str, Any],
    *,
    manager: str = "ours",
    steps: int,
    kill_at: int | None = None,
    **options: Any,
) -> dict[str, Any]:
    config = MANAGERS[manager].Config(**{**CHECKPOINT, **checkpoint})
    trainer = trainer_of(config_of(folder, config, steps=steps, **options))
    losses: dict[int, float] = {}

    def log(step: int, average: float, *_: Any, **__: Any) -> None:
        losses[step] = average
        if step == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    trainer.metrics_processor.log = log
    try:
        if config.create_seed_checkpoint:  # as torchtitan's own train.py
            trainer.checkpointer.save(curr_step=0, last_step=True)
        else:
            trainer.train()
    except (CkptstoreError, ValueError) as error:
        return {"error": f"{type(error).__name__}: {error}", "losses": losses}
    finally:
        trainer.close()
        dist.destroy_process_group()
    return {"losses": losses, "saved": trainer.checkpointer.store.uri if manager == "ours" else ""}


def refused(root: str) -> dict[str, str]:
    """What wrong options are answered with, and what a manager does that is switched off."""
    config = CkptstoreCheckpointManager.Config
    parts: dict[str, Any] = {"model_parts": [torch.nn.Linear(1, 1)], "states": {"train_state": None}}
    parts |= dict.fromkeys(("dataloader", "optimizers", "lr_schedulers", "sd_adapter"))

    def said(make: Callable[[], Any]) -> str:
        try:
            return str(make())
        except ValueError as error:
            return f"{type(error).__name__}: {error}"

    def off() -> str:
        manager = config(enable=False).build(**parts)
        return f"{manager.save(1, last_step=True)} {manager.load()} {bool(manager.close())}"

    return {
        "mode": said(lambda: config(async_mode="sometimes")),
        "inside": said(lambda: config(folder=f"{root}/a", hf_folder=f"{root}/a/hf", last_save_in_hf=True)),
        "hf_folder": said(lambda: config(hf_folder=f"{root}/hf")),
        "keep": said(lambda: config(keep_latest_k=-1)),
        "relative": said(lambda: config(initial_load_path="a/b")),
        "excluded": said(lambda: config(enable=True, exclude_from_loading=["momentum"]).build(**parts)),
        "adapter": said(lambda: config(enable=True, last_save_in_hf=True).build(**parts)),
        "off": said(off),
    }


def from_page(page: str, root: str) -> dict[str, Any]:
    """The config of the page's first example, as torchtitan's command line makes it."""
    source = Path(page).read_text().split("```python no-run")[1].partition("\n")[2].partition("```")[0]
    Path(root, "my_configs.py").write_text(source)
    sys.path.append(root)
    options = ["--checkpoint.async_mode", "async", "--checkpoint.keep_latest_k", "3", "--checkpoint.last_save_in_hf"]
    options += ["--checkpoint.hf_folder", "gs://bucket/hf"]
    config = ConfigManager().parse_args(["--module", "my_configs", "--config", "llama3_8b_in_a_bucket", *options])
    assert config.checkpoint._owner is CkptstoreCheckpointManager
    return dict(config.checkpoint.to_dict())
