"""Trace over ranks: the leader sends data of its trace with a save or a load, so that all ranks join one trace.

Without a tracer nothing is made, nothing is sent and no message grows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

logger = logging.getLogger("ckptstore")

TOLD = "trace"
"""The field of a message that has the leader's data."""


@dataclass(frozen=True, slots=True)
class Traced:
    """The part of one rank in one save or one load."""

    kind: Literal["save", "load"]
    name: str
    """The name in events: the attempt of a save, or a name that no other load of this process has."""
    rank: int
    step: int | None
    """The step; None where it is not known yet."""
    started_at: float
    """The time at which it began, in seconds since the epoch."""


class Tracer(Protocol):
    """An object that traces. Its errors are logged and dropped."""

    def tell(self, operation: Traced) -> Mapping[str, str]:
        """Leader: return the data for the other ranks."""

    def hear(self, operation: Traced, told: Mapping[str, str]) -> None:
        """Any rank: receive the leader's data; empty if the leader does not trace."""


_tracers: list[Tracer] = []


def told(make: Callable[[], Traced]) -> dict[str, Any]:
    """Leader: return the fields to add to a message; none without a tracer, and then `make` is not called."""
    if not _tracers:
        return {}
    operation = make()
    found: dict[str, str] = {}
    for tracer in _tracers:
        with _dropped():
            found.update(tracer.tell(operation))
    return {TOLD: found} if found else {}


def hear(message: Mapping[str, Any], make: Callable[[], Traced]) -> None:
    """Any rank: pass the data in the leader's message to the tracers."""
    if not _tracers:
        return
    operation, given = make(), message.get(TOLD, {})
    for tracer in _tracers:
        with _dropped():
            tracer.hear(operation, given)


@contextmanager
def tracing(tracer: Tracer) -> Iterator[None]:
    """Call `tracer` for every save and load of this process while the context lasts."""
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
