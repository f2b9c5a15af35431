"""Signs of life from a rank that works to the ranks that wait for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Beat = Callable[[], None]
"""Gives a sign of life. Cheap, and called from any thread. That of a group never raises; an error that another one
raises ends the work."""


def no_beat() -> None:
    """Do nothing: nobody waits for a sign of life."""


_current: ContextVar[Beat] = ContextVar("ckptstore-beat", default=no_beat)

_awaited: list[Beat] = []
"""The signs of life of all work in this process for which other ranks wait."""


def beat() -> None:
    """Give a sign of life for the work of this thread. Called whenever bytes have moved."""
    _current.get()()


def current_beat() -> Beat:
    """Return the function that `beat` calls on this thread, for another thread that works for this one."""
    return _current.get()


@contextmanager
def beating(sign: Beat) -> Iterator[None]:
    """Have `beat` call `sign` on this thread while the context lasts."""
    token = _current.set(sign)
    try:
        yield
    finally:
        _current.reset(token)


@contextmanager
def awaited(sign: Beat) -> Iterator[None]:
    """Do as `beating` does, and have `alive`, on any thread of this process, call `sign` too."""
    _awaited.append(sign)
    try:
        with beating(sign):
            yield
    finally:
        _awaited.remove(sign)


def alive() -> None:
    """Give all signs of life that other ranks wait for. Called before a request is retried."""
    # So a storage in trouble is not taken for the death of a rank, for as long as retries last.
    for sign in tuple(_awaited):
        sign()
