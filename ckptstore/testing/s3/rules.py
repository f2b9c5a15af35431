"""Inject faults on purpose: rules that match requests, each good for a number of them."""

from __future__ import annotations

import random
import re
import threading
from collections.abc import Iterable
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Literal, get_args

Action = Literal["status", "reset", "delay", "stall", "lose_answer", "truncate", "corrupt", "bandwidth"]


@dataclass(slots=True, kw_only=True)
class Fault:
    """One rule.

    `status`: answer with `status` and `code`, and do nothing. `reset`: reset the connection before anything is done,
    after `after_bytes` bytes of the request's body. `delay`: wait `seconds` before anything is done. `stall`: the same,
    but for good without `seconds`. `lose_answer`: do it, then reset instead of answering. `truncate`: reset after
    `after_bytes` bytes of the answer's body. `corrupt`: flip a bit of the answer's body. `bandwidth`: move the bodies
    at `bytes_per_second`.
    """

    action: Action
    match: str = ""
    """A regular expression, searched in "METHOD /path?query"."""
    times: int | None = 1
    """The number of requests it hits; None for all."""
    skip: int = 0
    """The number of matching requests it lets pass first."""
    probability: float = 1.0
    status: int = 503
    code: str = "SlowDown"
    seconds: float | None = None
    after_bytes: int = 0
    bytes_per_second: float = 50e6

    def __post_init__(self) -> None:
        """Raise ValueError for a rule that would hit no request, or do nothing to it."""
        if self.action not in get_args(Action):
            raise ValueError(f"action is {self.action!r}, it is one of {', '.join(get_args(Action))}")
        if (self.times is not None and self.times < 1) or self.skip < 0 or not 0 < self.probability <= 1:
            raise ValueError(f"{self} hits no request")
        if self.status not in map(int, HTTPStatus) or not self.bytes_per_second > 0:
            raise ValueError(f"{self} has a status or a bandwidth that cannot be")
        if self.action == "delay" and not (self.seconds or 0) > 0:
            raise ValueError(f"{self} does not say for how many seconds")


class Faults:
    """The rules of a server; safe to change while it works."""

    def __init__(self) -> None:
        self._rules: list[Fault] = []
        self._lock = threading.Lock()
        self._random = random.Random(0)

    def add(self, *rules: Fault) -> None:
        """Add rules. The first one that matches a request hits it. What is used up is a copy of a rule."""
        for rule in rules:
            re.compile(rule.match)
        with self._lock:
            self._rules.extend(map(replace, rules))

    def replace(self, rules: Iterable[Fault]) -> None:
        """Replace all rules."""
        self.clear()
        self.add(*rules)

    def clear(self) -> None:
        """Remove all rules."""
        with self._lock:
            self._rules.clear()

    @property
    def pending(self) -> int:
        """The number of rules that can still hit a request."""
        with self._lock:
            return sum(rule.times is None or rule.times > 0 for rule in self._rules)

    def pick(self, line: str) -> Fault | None:
        """Return the rule that hits this request, and use it up once."""
        with self._lock:
            for rule in self._rules:
                if rule.times == 0 or not re.search(rule.match, line):
                    continue
                if rule.skip > 0:
                    rule.skip -= 1
                elif self._random.random() < rule.probability:
                    rule.times = None if rule.times is None else rule.times - 1
                    return rule
        return None
