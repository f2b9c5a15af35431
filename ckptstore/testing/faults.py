"""Count, delay, fail, tear and kill in storages: `wrap` puts a hook around every call of a storage.

    counted = CountCalls()
    storage = wrap(MemoryStorage("memory://test"), counted)
    storage = wrap(storage, FailAt("create log/*", effect="after"))       # the reply of the next commit is lost
    storage = wrap(storage, KillAt(17, when="during"))                    # this process dies inside its 17th call

A wrapped storage has exactly the powers of the one inside. Accesses to a path of `local_path` are not calls.
"""

from __future__ import annotations

import copy
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Literal, NoReturn

from ckptstore.errors import InvalidInput, StorageUnavailable
from ckptstore.runtime.near import meant, nearest
from ckptstore.testing.hooked import VERBS, Call, Hook, wrap

__all__ = [
    "FAULTS_VARIABLE",
    "RANK_VARIABLE",
    "Call",
    "CountCalls",
    "Delay",
    "FailAt",
    "Hook",
    "KillAt",
    "Match",
    "TearAt",
    "combine",
    "hook_from_environment",
    "wrap",
]

FAULTS_VARIABLE = "CKPTSTORE_TEST_FAULTS"
RANK_VARIABLE = "CKPTSTORE_TEST_RANK"


Match = int | str | Callable[[Call], bool]
"""Selects calls: an index; "verb" or "verb key-pattern" with shell wildcards in both; or a predicate."""


def combine(*hooks: Hook) -> Hook:
    """Return one hook that calls all of them in order, up to the first one that raises."""
    return _Combined(hooks)


@dataclass(frozen=True, slots=True)
class _Combined:
    hooks: tuple[Hook, ...]

    def __call__(self, call: Call) -> None:
        for hook in self.hooks:
            hook(call)


class CountCalls:
    """Counts calls and bytes, and records the calls. In another process it starts from nothing."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.clear()

    def __reduce__(self) -> tuple[Any, ...]:
        return CountCalls, ()

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self.calls: list[Call] = []
            """Every call in order, as it was before it was made."""
            self.counts: Counter[str] = Counter()
            """Calls per verb, failed ones too."""
            self.size_bytes: Counter[str] = Counter()
            """Bytes per verb, of calls that returned."""

    @property
    def total(self) -> int:
        """The number of calls."""
        return self.counts.total()

    def __call__(self, call: Call) -> None:
        with self._lock:
            if call.phase == "before":
                self.calls.append(replace(call, do_half=lambda: None))
                self.counts[call.verb] += 1
            else:
                self.size_bytes[call.verb] += call.size_bytes


@dataclass(frozen=True, slots=True)
class Delay:
    """Sleep before each call: the same time for all, or seconds per verb."""

    seconds: float | Mapping[str, float]

    def __post_init__(self) -> None:
        by_verb = self.seconds if isinstance(self.seconds, Mapping) else {"*": self.seconds}
        for verb, seconds in by_verb.items():
            _check_verb(verb)
            if not seconds >= 0:
                raise InvalidInput(f"A delay of {seconds!r} s is none", hint="Give a number of at least 0")

    def __call__(self, call: Call) -> None:
        if call.phase == "before":
            time.sleep(self.seconds if isinstance(self.seconds, int | float) else self.seconds.get(call.verb, 0.0))


class _AtMatch:
    """Strikes at calls that match: after the first `skip` of them, at `times` of them (None: at all)."""

    def __init__(self, match: Match, *, phase: str, skip: int = 0, times: int | None = 1) -> None:
        """Raises InvalidInput for what would never strike."""
        if isinstance(match, str):
            _check_verb(match.partition(" ")[0])
        elif not callable(match) and (type(match) is not int or match < 0):
            raise InvalidInput(f"{match!r} matches no call", hint='Give an index, "verb key-pattern" or a function')
        if type(skip) not in (int, bool) or skip < 0 or (times is not None and (type(times) is not int or times < 1)):
            raise InvalidInput(f"skip is {skip!r} and times {times!r}: a number from 0, and one from 1 or None")
        self.match, self._phase, self._skip, self._times = match, phase, skip, times
        self._lock = threading.Lock()
        self._matched = 0

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()

    @property
    def struck(self) -> int:
        """The number of times it has struck."""
        past = max(0, self._matched - self._skip)
        return past if self._times is None else min(past, self._times)

    def __call__(self, call: Call) -> None:
        if call.phase != self._phase or not _matches(self.match, call):
            return
        with self._lock:
            self._matched += 1
            past = self._matched - self._skip
        if past > 0 and (self._times is None or past <= self._times):
            self._strike(call)

    def _strike(self, call: Call) -> None:
        raise NotImplementedError


class FailAt(_AtMatch):
    """Raises `error` at calls that match, before they have an effect or after (a lost reply)."""

    def __init__(
        self,
        match: Match,
        error: Exception | None = None,
        *,
        effect: Literal["before", "after"] = "before",
        skip: int = 0,
        times: int | None = 1,
    ) -> None:
        if effect not in ("before", "after"):
            raise InvalidInput(f"effect is {effect!r}, it is 'before' or 'after'")
        super().__init__(match, phase=effect, skip=skip, times=times)
        self.error = _checked(error) or StorageUnavailable("A fault was injected")

    def _strike(self, call: Call) -> NoReturn:
        raise copy.copy(self.error)  # one object raised by several threads would mix their tracebacks


class TearAt(_AtMatch):
    """Does a part of a call, then raises `error`: a torn file, a read that filled half of its views, half a delete."""

    def __init__(self, match: Match, error: Exception | None = None, *, skip: int = 0, times: int | None = 1) -> None:
        super().__init__(match, phase="before", skip=skip, times=times)
        self.error = _checked(error) or StorageUnavailable("A call was torn in the middle")

    def _strike(self, call: Call) -> NoReturn:
        call.do_half()
        raise copy.copy(self.error)


class KillAt(_AtMatch):
    """Kills this process with SIGKILL before, during (half done) or after the call that matches."""

    def __init__(self, match: Match, *, when: Literal["before", "during", "after"] = "before", skip: int = 0) -> None:
        if when not in ("before", "during", "after"):
            raise InvalidInput(f"when is {when!r}, it is 'before', 'during' or 'after'")
        super().__init__(match, phase="after" if when == "after" else "before", skip=skip)
        self.when = when

    def _strike(self, call: Call) -> NoReturn:
        if self.when == "during":
            call.do_half()
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("SIGKILL returned")


def _check_verb(pattern: object) -> None:
    """Raise InvalidInput for a pattern that no verb fits: such a fault would never strike, and its test would pass."""
    if not isinstance(pattern, str) or not any(fnmatchcase(verb, pattern) for verb in VERBS):
        raise InvalidInput(
            f"no call is {pattern!r}{meant(nearest(str(pattern), VERBS))}", hint=", ".join(sorted(VERBS))
        )


def _checked(error: Any) -> Any:
    is_class = isinstance(error, type) and issubclass(error, BaseException)
    if error is not None and not is_class and not isinstance(error, BaseException):
        raise InvalidInput(f"error is {error!r}, it is an exception")
    return error


def _matches(match: Match, call: Call) -> bool:
    if isinstance(match, int):
        return call.index == match
    if isinstance(match, str):
        verb, _, pattern = match.partition(" ")
        return fnmatchcase(call.verb, verb) and (not pattern or fnmatchcase(call.key, pattern))
    return match(call)


def hook_from_environment(environ: Mapping[str, str] | None = None) -> Hook | None:
    """Return the hook of the environment, None without one or if it is for another rank.

    CKPTSTORE_TEST_FAULTS holds faults separated by ";": "kill before|during|after MATCH", "fail before|after MATCH",
    "tear MATCH", "delay SECONDS [VERB]", where MATCH is an index, "verb" or "verb key-pattern". CKPTSTORE_TEST_RANK
    limits them to the process with that RANK. Raises InvalidInput for any other text.
    """
    environ = os.environ if environ is None else environ
    text, rank = environ.get(FAULTS_VARIABLE, "").strip(), environ.get(RANK_VARIABLE)
    if not text or (rank is not None and rank != environ.get("RANK")):
        return None
    return combine(*(_parse(fault.strip()) for fault in text.split(";") if fault.strip()))


def _parse(text: str) -> Hook:
    kind, _, rest = text.partition(" ")
    first, _, calls = rest.strip().partition(" ")
    try:
        if kind == "kill" and first in ("before", "during", "after"):
            return KillAt(_parse_match(calls), when=first)  # type: ignore[arg-type]
        if kind == "fail" and first in ("before", "after"):
            return FailAt(_parse_match(calls), effect=first)  # type: ignore[arg-type]
        if kind == "tear":
            return TearAt(_parse_match(rest))
        if kind == "delay":
            return Delay({calls.strip(): float(first)} if calls.strip() else float(first))
        raise ValueError(f"{kind!r} is no fault, or lacks when it strikes")
    except ValueError as error:
        raise InvalidInput(f"{FAULTS_VARIABLE} has {text!r}, which means nothing: {error}") from None


def _parse_match(text: str) -> Match:
    text = text.strip()
    if not text:
        raise ValueError("it does not say which calls")
    return int(text) if text.isdecimal() else text
