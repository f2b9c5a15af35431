"""`--keep latest=3`: retention as words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce

from ckptstore.errors import InvalidInput
from ckptstore.retention import KeepBest, KeepEvery, KeepLatest, KeepSince, Policy

_FORMS = "latest=N, best=N:METRIC[:min|max], every=STEPS or since=SECONDS"


def parse_keep(texts: Sequence[str], *, seconds: Callable[[str], float]) -> Policy | None:
    """The policy that keeps what any of the texts says; None without texts. `seconds` reads a duration.

    Raises InvalidInput.
    """
    policies = [_parse(text, seconds) for text in texts]
    return reduce(lambda joined, policy: joined | policy, policies) if policies else None


def _parse(text: str, seconds: Callable[[str], float]) -> Policy:
    rule, _, value = text.partition("=")
    if rule == "since" and value:
        return KeepSince(seconds(value))
    count, _, metric = value.partition(":")
    if count.isdecimal():
        if rule == "latest" and not metric:
            return KeepLatest(int(count))
        if rule == "every" and not metric:
            return KeepEvery(steps=int(count))
        if rule == "best" and metric:
            name, _, mode = metric.rpartition(":")
            if name and mode in ("min", "max"):
                return KeepBest(int(count), name, "min" if mode == "min" else "max")
            return KeepBest(int(count), metric)
    raise InvalidInput(f"{text!r} does not say what to keep: it is {_FORMS}")
