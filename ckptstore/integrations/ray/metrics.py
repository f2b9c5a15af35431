"""Convert metrics for Ray's bookkeeping. Pure, but for warnings.

Ray keeps metrics as JSON, and ranks checkpoints by one of them, the score. A scalar of numpy in them ends the run. A
NaN score comes back as null after a restart, and ends the run then. A missing score counts as the lowest number, so
that with order "min" it is the best, and the best one is deleted. So a score is always made a finite number: a missing
or not finite one becomes the worst possible, and `REPLACED` records the original.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ckptstore.errors import InvalidInput, InvalidMetric
from ckptstore.format.encoding import float_name

logger = logging.getLogger("ckptstore.ray")

Order = Literal["max", "min"]

REPLACED = "ckptstore_replaced"
"""The metric that names the replaced score and its original value: {"loss": "NaN"}."""

_WORST = {"max": -sys.float_info.max, "min": sys.float_info.max}
_SEPARATOR = "/"
"""Ray's separator in the name of a nested metric."""
_MAX_DEPTH = 32


@dataclass(frozen=True, slots=True)
class Score:
    """The metric by which Ray ranks checkpoints."""

    name: str
    """Parts of nested metrics are joined by "/"."""
    order: Order

    def __post_init__(self) -> None:
        if self.order not in _WORST:
            raise InvalidInput(f"order is {self.order!r}, it is 'max' or 'min'")

    @property
    def worst(self) -> float:
        """The finite number that ranks below all others."""
        return _WORST[self.order]


def safe_metrics(metrics: Mapping[str, Any], *, score: Score | None) -> dict[str, Any]:
    """Convert the metrics of a report with a checkpoint: Ray accepts them, and ranks by finite numbers.

    Raises InvalidMetric as `plain_metrics` does, and for a score that is no number.
    """
    safe = plain_metrics(metrics)
    if score is None:
        return safe
    places = list(_places(safe, score.name))
    replaced = None if places else "missing"
    for holder, name in places:
        fault = _fault_of(holder[name], score.name)
        if fault is not None:
            holder[name], replaced = score.worst, fault
    if not places:
        safe[score.name] = score.worst
    safe.pop(REPLACED, None)  # that of a report whose metrics are reported again
    if replaced is not None:
        safe[REPLACED] = {score.name: replaced}
    return safe


def rank_last(metrics: dict[str, Any], score: Score, reason: str) -> None:
    """Replace the score in metrics, as returned by `safe_metrics`, wherever Ray may find it."""
    for holder, name in _places(metrics, score.name):
        holder[name] = score.worst
    metrics[REPLACED] = {score.name: reason}


def warn_of_worst(metrics: Mapping[str, Any], *, step: int | None = None, ranked_by: Collection[str] = ()) -> None:
    """Log the metrics, as returned by `safe_metrics`, that rank as the worst: the replaced score, and missing ones by
    which the store's retention ranks.
    """
    replaced = dict.fromkeys(set(ranked_by) - numbers_of(metrics).keys(), "missing") | metrics.get(REPLACED, {})
    for name, fault in sorted(replaced.items()):
        what = "a report" if step is None else f"the report of step {step}"
        logger.warning("the metric %r is %s in %s: it ranks as the worst", name, fault, what)


def plain_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics with Python's own numbers in place of numpy's and torch's; lists and dicts are copied.

    Raises InvalidMetric, which names it, for anything that JSON cannot hold, such as a tensor of several elements. NaN
    and infinities stay: they only do harm as a score.
    """
    if not isinstance(metrics, Mapping):
        raise InvalidMetric(f"metrics is a {type(metrics).__name__}, not a mapping of names to values")
    return _plain_mapping(metrics, "", 0)


def numbers_of(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return all numbers of plain metrics by full names, as for a manifest; NaN and infinities included."""
    return {name: value for name, value in _flat(metrics, "") if isinstance(value, int | float)}


def with_those_of_others(metrics: Mapping[str, Any] | None, joined: Mapping[str, float]) -> dict[str, Any]:
    """Return the metrics, and those of all ranks that they lack: Ray keeps the report of rank 0 alone."""
    own = metrics or {}
    known = numbers_of(plain_metrics(own))
    return {**{name: value for name, value in joined.items() if name not in known}, **own}


def _plain(value: Any, name: str, depth: int) -> Any:
    if value is None or type(value) in (bool, int, float):
        return value
    if isinstance(value, str):
        return _text(str(value), name)
    if depth > _MAX_DEPTH:
        raise InvalidMetric(f"the metric {name!r} is nested too deeply, or holds itself")
    if isinstance(value, Mapping):
        return _plain_mapping(value, f"{name}{_SEPARATOR}", depth)
    if isinstance(value, list | tuple):
        return [_plain(item, f"{name}[{index}]", depth + 1) for index, item in enumerate(value)]
    shape = getattr(value, "shape", None)
    if callable(item := getattr(value, "item", None)) and isinstance(shape, tuple) and math.prod(shape) == 1:
        return _plain(_unwrapped(item, value, name), name, depth)
    if isinstance(value, int | float):  # a class of its own
        return int(value) if isinstance(value, int) else float(value)
    raise InvalidMetric(
        f"the metric {name!r} is a {type(value).__name__}, which Ray cannot keep",
        hint="Give numbers, text, None, and lists or dicts of them; of a tensor or an array give .tolist()",
    )


def _unwrapped(item: Callable[[], Any], value: Any, name: str) -> Any:
    """Return the Python number in an array or a tensor of one element."""
    try:
        number = item()
    except Exception as error:  # whatever a library of tensors raises for one without a value
        raise InvalidMetric(f"the metric {name!r} has no value: {error}") from None
    if hasattr(number, "item"):  # a long double stays one
        raise InvalidMetric(f"the metric {name!r} is a {type(value).__name__}, which no Python number stands for")
    return number


def _plain_mapping(metrics: Mapping[Any, Any], prefix: str, depth: int) -> dict[str, Any]:
    plain = {}
    for key, value in metrics.items():
        if not isinstance(key, str) or not key:
            raise InvalidMetric(f"the metric name {key!r} is not text")
        name = f"{prefix}{_text(key, prefix + key)}"
        plain[str(key)] = _plain(value, name, depth + 1)
    return plain


def _text(text: str, name: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidMetric(f"the metric {name!r} has text that is not valid Unicode: {error}") from None
    return text


def _places(metrics: dict[str, Any], name: str) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield every place where Ray may find the metric: by its full name, or nested. Names may contain "/"."""
    if name in metrics:
        yield metrics, name
    for index, char in enumerate(name):
        inner = metrics.get(name[:index]) if char == _SEPARATOR else None
        if isinstance(inner, dict):
            yield from _places(inner, name[index + 1 :])


def _fault_of(value: Any, name: str) -> str | None:
    """Return the reason why a score cannot stay, None if it can."""
    if value is None:
        return "None"
    if not isinstance(value, int | float):
        raise InvalidMetric(
            f"the metric {name!r} is {value!r}, and Ray is to rank checkpoints by it",
            hint="Give a number, or leave it out",
        )
    try:
        number = float(value)
    except OverflowError:
        number = math.inf if value > 0 else -math.inf
    return None if math.isfinite(number) else float_name(number)


def _flat(metrics: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in metrics.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}{_SEPARATOR}")
        else:
            yield f"{prefix}{name}", value
