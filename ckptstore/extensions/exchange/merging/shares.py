"""Calculate the share of each checkpoint in a merge. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal, get_args

from ckptstore.errors import InvalidInput

Method = Literal["average", "ema", "wsm-decay", "slerp"]
Schedule = Literal["1-sqrt", "cosine", "linear"]

_OPTIONS = {"weights": ("average", "slerp"), "decay": ("ema",), "schedule": ("wsm-decay",)}
"""The methods that an option is for."""


def shares(
    count: int,
    method: Method,
    *,
    weights: Sequence[float] | None = None,
    decay: float | None = None,
    schedule: Schedule | None = None,
) -> tuple[float, ...]:
    """Return the coefficient of each of `count` checkpoints, the oldest first; their sum is 1.

    Raises InvalidInput for an option that the method does not have, and for one out of range.
    """
    if method not in get_args(Method):
        raise InvalidInput(f"method is {method!r}, it is one of {', '.join(get_args(Method))}")
    if schedule is not None and schedule not in get_args(Schedule):
        raise InvalidInput(f"schedule is {schedule!r}, it is one of {', '.join(get_args(Schedule))}")
    for name, value in (("weights", weights), ("decay", decay), ("schedule", schedule)):
        if value is not None and method not in _OPTIONS[name]:
            raise InvalidInput(f"{name} means nothing for {method!r}", hint=f"It is for {' and '.join(_OPTIONS[name])}")
    if method == "ema":
        if decay is None or not (_is_number(decay) and 0 <= decay < 1):
            hint = "0.9 keeps 90 % of the average before"
            raise InvalidInput(f"decay is {decay}, it is at least 0 and below 1", hint=hint)
        return (decay ** (count - 1), *((1 - decay) * decay ** (count - 1 - number) for number in range(1, count)))
    if method == "wsm-decay":
        rates = [1.0, *(_rate(schedule or "1-sqrt", number / count) for number in range(1, count)), 0.0]
        return tuple(before - after for before, after in pairwise(rates))
    return _normalized(count, (1.0,) * count if weights is None else weights, is_arc=method == "slerp")


def _normalized(count: int, weights: Any, *, is_arc: bool) -> tuple[float, ...]:
    if is_arc and count != 2:
        raise InvalidInput(f'"slerp" is of two checkpoints, {count} were passed')
    if isinstance(weights, str) or not isinstance(weights, Sequence) or not all(map(_is_number, weights)):
        raise InvalidInput(f"weights is {weights!r}, it is a list of numbers, one for each checkpoint")
    if len(weights) != count:
        raise InvalidInput(f"There are {len(weights)} weights for {count} checkpoints")
    try:
        total = math.fsum(weights)
    except (OverflowError, ValueError):  # of the largest numbers, and of infinities of both signs
        total = math.inf
    if total == 0 or not math.isfinite(total):
        raise InvalidInput(f"The weights {list(weights)} cannot be divided by their sum")
    if is_arc and min(weights) < 0:
        raise InvalidInput(f"The weights {list(weights)} lie beyond the ends of the arc", hint="None is below 0")
    return tuple(weight / total for weight in weights)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _rate(schedule: Schedule, progress: float) -> float:
    """Return the learning rate at this progress of the decay, as a share of the first one."""
    if schedule == "cosine":
        return (1 + math.cos(math.pi * progress)) / 2
    return 1 - (math.sqrt(progress) if schedule == "1-sqrt" else progress)
