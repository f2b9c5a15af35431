"""Retention as texts, such as "latest=3 every=1000", for command lines, variables and configurations. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import reduce

from ckptstore.errors import InvalidInput
from ckptstore.retention import KeepBest, KeepEvery, KeepLatest, KeepSince, KeepWeights, KeepWithin, Policy
from ckptstore.runtime.shown import read_duration


def parse_policy(rules: str | Sequence[str]) -> Policy | None:
    """Return the policy that keeps what any of the rules keeps, None without rules. Raises InvalidInput.

    Rules are one text, such as "latest=3 best=2:eval_loss:min every=1000 since=2d" (with spaces or commas between
    them), or several such texts. `every` counts steps; "best=2:eval_loss" is enough where the metric's name tells
    which way is better. "weights:every=1000" keeps what "every=1000" does without the optimizer: `KeepWeights`.
    "within=2TB" is a budget for what the other rules keep.
    """
    texts = ([rules] if rules.strip() else []) if isinstance(rules, str) else rules
    policies = [_parse_rule(rule) for text in texts for rule in _BETWEEN_RULES.split(text.strip())]
    budgets = [policy for policy in policies if isinstance(policy, KeepWithin)]
    others = [policy for policy in policies if not isinstance(policy, KeepWithin)]
    if len(budgets) > 1:
        raise InvalidInput("There are several budgets", hint="Give within=... once")
    joined = reduce(lambda joined, policy: joined | policy, others) if others else None
    if not budgets:
        return joined
    return budgets[0] if joined is None else joined & budgets[0]


_BETWEEN_RULES = re.compile(r"[,\s]+(?=(?:weights:)?\w+=)")
"""Other commas and spaces belong to the name of a metric."""


RULES = "latest=3 best=2:eval_loss:min every=1000 since=2d weights:every=100 within=2TB"
"""One rule of each kind, as every message and help text spells them."""


def _parse_rule(text: str) -> Policy:
    if text.startswith("weights:"):
        return KeepWeights(_parse_rule(text.removeprefix("weights:")))
    rule, _, value = text.partition("=")
    if rule == "since" and value:
        return KeepSince(read_duration(value))
    if rule == "within" and value:
        return KeepWithin(value)
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
            try:
                return KeepBest(int(count), metric)
            except InvalidInput as error:
                raise InvalidInput(error.message, hint=f"Write {text}:min or {text}:max") from None
    raise InvalidInput(f"{text!r} is no rule of what to keep", hint=f"Rules are like {RULES}")
