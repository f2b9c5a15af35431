"""Write a checkpoint of a store as a Lightning file: for `ckpt_path="best"` of test, validate and predict."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ckptstore.checkpoint import Checkpoint, files_behind
from ckptstore.errors import InvalidState
from ckptstore.loading.load_state import open_alone
from ckptstore.retention import KeepAny, KeepBest, KeepWithin, Mode, Policy
from ckptstore.state.live.flatten import map_tensors, references_in
from ckptstore.state.read.stored import read_whole
from ckptstore.state.tensors.wrapped import Wrapped

FILE_NAME = "lightning.ckpt"
_MODEL = "model."


def mode_in(policy: Policy, metric: str) -> Mode | None:
    """Return whether the retention of a store prefers a high or a low metric, None if it does not rank by it."""
    if isinstance(policy, KeepWithin):
        return mode_in(policy.policy, metric)
    members = policy.members if isinstance(policy, KeepAny) else (policy,)
    return next((item.mode for item in members if isinstance(item, KeepBest) and item.metric == metric), None)


def write_file(checkpoint: Checkpoint, directory: Path, *, version: str, allow_pickle: bool) -> None:
    """Write weights, hooks' entries and callbacks' states, as Lightning lays them out; every byte is checked.

    Where ranks differ, the lowest rank's value is taken. Needs memory for all weights. `version` is that of Lightning.
    Raises InvalidState for tensors that wrap others, which no such file holds.
    """
    files = files_behind(checkpoint).alone()
    with files.held():
        stored = open_alone(files)
        stored.allow_pickle = allow_pickle
        saved = stored.saved(lambda key: key in ("hooks", "callbacks") or key.startswith(_MODEL))
        wrapped = [key for key, value in saved.values.items() if isinstance(value, Wrapped)]
        if wrapped:
            raise InvalidState(
                f"{wrapped[0]} wraps other tensors, and a Lightning file cannot hold it",
                step=checkpoint.step,
                hint="Load it with callback.store.best(metric).load({'model': module})",
            )
        sources = {key: saved.aliases.get(key, key) for key in (*saved.tensors, *saved.aliases)}
        needed = {source for key, source in sources.items() if key.startswith(_MODEL)}
        needed |= {sources[key] for value in saved.values.values() for key in references_in(value)}
        tensors = read_whole(stored, {key: stored.entry(key) for key in needed})

    def whole(key: str, value: Any) -> Any:
        return map_tensors(value, (key,), lambda _, leaf: tensors[sources[leaf.key]])

    weights = {key.removeprefix(_MODEL): tensors[at] for key, at in sources.items() if key.startswith(_MODEL)}
    values = {key: whole(key, value) for key, value in saved.values.items()}
    weights |= {key.removeprefix(_MODEL): value for key, value in values.items() if key.startswith(_MODEL)}
    contents = {
        "epoch": 0,
        "global_step": checkpoint.step,
        **values.get("hooks", {}),
        "callbacks": values.get("callbacks", {}),
        "state_dict": weights,
        "pytorch-lightning_version": version,
    }
    torch.save(contents, directory / FILE_NAME)
