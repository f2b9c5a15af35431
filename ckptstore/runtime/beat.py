"""The sign of life that whoever works gives to whoever waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Beat = Callable[[], None]
"""Gives a sign of life. Cheap, and called from any thread. That of a group never raises; what another one raises ends
the work."""


def no_beat() -> None:
    """Do nothing: nobody waits for a sign of life."""


_current: ContextVar[Beat] = ContextVar("ckptstore-beat", default=no_beat)

_awaited: list[Beat] = []
"""Those of all work in this process for which other ranks wait."""


def beat() -> None:
    """Give a sign of life for the work that this thread does. Called whenever bytes have moved."""
    _current.get()()


def current_beat() -> Beat:
    """Return what `beat` calls here, for a thread that works for this one."""
    return _current.get()


@contextmanager
def beating(sign: Beat) -> Iterator[None]:
    """Let `beat` call `sign` inside, on this thread and on those that it starts by `runtime.parallel`."""
    token = _current.set(sign)
    try:
        yield
    finally:
        _current.reset(token)


@contextmanager
def awaited(sign: Beat) -> Iterator[None]:
    """As `beating`; `alive`, on any thread of this process, calls it too."""
    _awaited.append(sign)
    try:
        with beating(sign):
            yield
    finally:
        _awaited.remove(sign)


def alive() -> None:
    """Give all signs of life that other ranks wait for: a request has been answered, if only by an error, and is made
    again. So a storage in trouble is not taken for the death of a rank, for as long as retries last."""
    for sign in tuple(_awaited):
        sign()
