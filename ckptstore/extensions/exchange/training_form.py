"""Weights that an optimizer holds in the form of its training: they are not those that a model should be used with.

A schedule-free optimizer trains at other points than it evaluates at, and says in its groups which of them the weights
are. Others keep averages of the weights in their state.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from ckptstore.state.index.tensor_index import TensorIndex
from ckptstore.state.live.values import dicts_in

logger = logging.getLogger("ckptstore")

_SETTING = re.compile(r"(.+?)\.param_groups\.(.+)\.(train_mode|lr_max)")
_AVERAGE = re.compile(
    r"(.+?)\.state\.(.+)\.(swa_buffer|ema|ema_params?|param_ema|exp_avg_param|slow_(?:buffer|params?)|lookahead_slow_buff)"
)
_NEXT_TO_MODE = frozenset({"lr", "params", "param_groups", "state", "base_optimizer", "schedulefree_state"})
"""Names of which one stands beside the mode of an optimizer."""


_EVAL = "call its eval() before the save, and train() after it"
_IN_TRAINING = f"was saved in training mode, so the weights are not those to evaluate with: {_EVAL}"
_MAYBE_IN_TRAINING = f"is schedule-free, and the weights may be those of its training mode: {_EVAL}"
_AVERAGED = (
    "keeps averages of the weights in its state ({item}), and the weights are not these: "
    "swap them in before the save, if they are meant"
)


def training_form(index: TensorIndex, keys: Collection[str]) -> list[str]:
    """Return a line for each optimizer that holds any of these tensors in the form of its training."""
    if not keys:
        return []
    weights = {name for key in keys for name in _ends(key)}
    found: dict[str, str] = {}
    modes: dict[str, set[str]] = {}
    for key, value in {**index.common_values(), **index.own_values(0)}.items():
        match = _SETTING.fullmatch(key)
        if match is not None and match[2] in weights:
            modes.setdefault(match[1], set()).add(f"{match[3]} {value}" if type(value) is bool else match[3])
        elif any(mode is True for mode in _modes_in(value)):
            found[key] = _IN_TRAINING
    for optimizer, seen in modes.items():
        if "train_mode True" in seen:
            found[optimizer] = _IN_TRAINING
        elif seen == {"lr_max"}:  # the wrapper of another optimizer, which does not store its mode
            found[optimizer] = _MAYBE_IN_TRAINING
    for key in index.tensors:
        match = _AVERAGE.fullmatch(key)
        if match is not None and match[2] in weights:
            found.setdefault(match[1], _AVERAGED.format(item=match[3]))
    return [f"the optimizer at {key!r} {what}" for key, what in sorted(found.items())]


def warn_of_training_form(lines: Iterable[str]) -> None:
    """Log what `training_form` returns; call it on one rank."""
    for line in lines:
        logger.warning("%s", line)


def _ends(key: str) -> Iterator[str]:
    """Yield a key, and what is left of it without the names before each dot, as torch's functions name parameters."""
    parts = key.split(".")
    for first in range(len(parts)):
        yield ".".join(parts[first:])


def _modes_in(value: Any) -> Iterator[Any]:
    """Yield the modes of optimizers in the JSON of a plain value, such as the result of `state_dict()`."""
    return (item.get("train_mode") for item in dicts_in(value) if not _NEXT_TO_MODE.isdisjoint(item))
