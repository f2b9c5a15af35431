"""Trainings of torchtitan's debug model, for ranks that are started by the tests."""

from __future__ import annotations

import hashlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.config import ConfigManager
from torchtitan_on_cpu import CheckpointManager, CkptstoreCheckpointManager, config_of, trainer_of

from ckptstore import open_store
from ckptstore.errors import CkptstoreError, StorageFull
from ckptstore.testing import Call, with_faults

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
    recipe: str = "",
    **options: Any,
) -> dict[str, Any]:
    """With `recipe`, which sets `config.checkpoint`, layers have a dropout, and each rank its own random numbers."""
    checkpoint = {
        name: value.format(os.environ["RANK"]) if isinstance(value, str) else value
        for name, value in checkpoint.items()
    }
    config = MANAGERS[manager].Config(**{**CHECKPOINT, **checkpoint})
    if recipe:
        exec(recipe, globals() | {"config": (names := SimpleNamespace())})
        config = names.checkpoint
    trainer = trainer_of(config_of(folder, config, steps=steps, **options))
    losses: dict[int, float] = {}
    if recipe:
        torch.manual_seed(dist.get_rank())
        for layer in trainer.model_parts[0].layers.values():
            layer.register_forward_hook(lambda _layer, _inputs, output: torch.nn.functional.dropout(output, 0.1))

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
        weights = [
            getattr(each, "full_tensor", lambda each=each: each)() for each in trainer.model_parts[0].parameters()
        ]
        digest = hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in weights)).hexdigest()
    except (CkptstoreError, ValueError) as error:
        return {"error": f"{type(error).__name__}: {error}", "losses": losses}
    finally:
        trainer.close()
        dist.destroy_process_group()
    return {"losses": losses, "weights": digest, "saved": trainer.checkpointer.store.uri if manager == "ours" else ""}


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
        "inside": said(
            lambda: config(enable=True, folder=f"{root}/a", hf_folder="a/hf", last_save_in_hf=True).build(
                **{**parts, "sd_adapter": object()}, base_folder=root
            )
        ),
        "hf_folder": said(lambda: config(hf_folder=f"{root}/hf")),
        "keep": said(lambda: config(keep_latest_k=-1)),
        "copies": said(lambda: config(fast="disk", fast_copies=3)),
        "no_tier": said(lambda: config(fast_keep=3)),
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


class Part(torch.nn.Module):
    """A stage of a pipeline: some layers of a model of four."""

    def __init__(self, layers: Sequence[int], *, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        weights = {str(number): torch.nn.Linear(8, 8) for number in range(4)}
        self.layers = torch.nn.ModuleDict({name: weights[name] for name in map(str, layers)})


class Position:
    """A part of the training that refuses a state on one rank."""

    def __init__(self, refused_by: int | None = None) -> None:
        self.step = 0
        self.refused_by = refused_by

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        assert self.refused_by != dist.get_rank(), "not this one"
        self.step = state["step"]


class Telling(logging.Handler):
    """Keeps warnings."""

    def __init__(self, told: list[str]) -> None:
        super().__init__(logging.WARNING)
        self.told = told

    def emit(self, record: logging.LogRecord) -> None:
        if "have no place" in record.getMessage():
            self.told.append(record.getMessage())


def stages(folder: str, deal: list[list[list[int]]], seed: int, action: str) -> dict[str, Any] | list[str] | str:
    """Save, or load, a model whose layers are dealt to ranks and on each to stages. All numbers that a rank holds."""
    dist.init_process_group("gloo")
    parts = [Part(layers, seed=seed) for layers in deal[dist.get_rank()]]
    optimizers = default_adamw().build(model_parts=parts)
    schedulers = LRSchedulersContainer.Config(warmup_steps=2).build(optimizers=optimizers, training_steps=10)
    position = Position(1 if action == "refuse" else None)
    config = CkptstoreCheckpointManager.Config(enable=True, folder=folder, interval=1, async_mode="async")
    told: list[str] = []
    logging.getLogger().addHandler(Telling(told))
    manager = config.build(
        dataloader=None,
        model_parts=parts,
        optimizers=optimizers,
        lr_schedulers=schedulers,
        states={"train_state": position},
        sd_adapter=None,
    )
    if action == "fill":
        return filled(manager)
    if action == "save":
        position.step = 1
        sum(part.layers[name](torch.ones(8)).square().sum() for part in parts for name in part.layers).backward()
        optimizers.step()
        schedulers.step()
        manager.save(1)
        manager.maybe_wait_for_saving()
    else:
        try:
            assert manager.load()
        except CkptstoreError as error:
            return f"{type(error).__name__}: {error}"
    manager.close()
    held = {**optimizers.state_dict(), **{key: item for part in parts for key, item in part.state_dict().items()}}
    found = {key: item.flatten().tolist() for key, item in held.items() if isinstance(item, torch.Tensor)}
    dist.destroy_process_group()
    return found | {"steps": [position.step, schedulers.state_dict()["last_epoch"]], "told": told}


def filled(manager: Any) -> list[str]:
    """What is raised when the disk of rank 1 is full during the first save, and what is stored in the end."""

    def hook(call: Call) -> None:
        if call.key.startswith("checkpoints/step-0000000001") and dist.get_rank() == 1:
            raise StorageFull("no room")

    manager.store = with_faults(manager.store, hook)
    told = []
    for step in (1, 2, 3):
        try:
            manager.save(step)
        except CkptstoreError as error:
            told.append(f"{type(error).__name__} in save({step}): step {error.step} rank {error.rank}")
    manager.close()
    return [*told, str([checkpoint.step for checkpoint in open_store(manager.folder, group="solo")])]
