"""Traces over ranks: what the leader tells with a save or a load, so that the work of all ranks hangs together.

Without a tracer nothing is made, nothing is told and no message grows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

logger = logging.getLogger("ckptstore")

TOLD = "trace"
"""The field of a message that has what the leader tells."""


@dataclass(frozen=True, slots=True)
class Traced:
    """What one rank does of one save or one load."""

    kind: Literal["save", "load"]
    name: str
    """The attempt of a save, a name that no other load of this process has of a load: what events call it."""
    rank: int
    step: int | None
    """None where it is not known yet."""
    started_at: float
    """In seconds since the epoch."""


class Tracer(Protocol):
    """Whoever traces. What it raises is logged and dropped."""

    def tell(self, operation: Traced) -> Mapping[str, str]:
        """Leader: what the other ranks have to hear."""

    def hear(self, operation: Traced, told: Mapping[str, str]) -> None:
        """Any rank: what the leader has told; nothing if it does not trace."""


_tracers: list[Tracer] = []


def told(make: Callable[[], Traced]) -> dict[str, Any]:
    """Leader: what is to be added to a message; nothing without a tracer, and then `make` is not called."""
    if not _tracers:
        return {}
    operation = make()
    found: dict[str, str] = {}
    for tracer in _tracers:
        with _dropped():
            found.update(tracer.tell(operation))
    return {TOLD: found} if found else {}


def hear(message: Mapping[str, Any], make: Callable[[], Traced]) -> None:
    """Any rank: give the tracers what the leader's message has for them."""
    if not _tracers:
        return
    operation, given = make(), message.get(TOLD, {})
    for tracer in _tracers:
        with _dropped():
            tracer.hear(operation, given)


@contextmanager
def tracing(tracer: Tracer) -> Iterator[None]:
    """Have `tracer` asked by every save and load of this process while the context lasts."""
    _tracers.append(tracer)
    try:
        yield
    finally:
        _tracers.remove(tracer)


@contextmanager
def _dropped() -> Iterator[None]:
    try:
        yield
    except Exception:  # a tracer must never fail a save
        logger.exception("a tracer failed")
