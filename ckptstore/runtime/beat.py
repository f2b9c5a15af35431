"""The sign of life that whoever works gives to whoever waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Beat = Callable[[], None]
"""Called by whoever does the work whenever bytes have moved: a sign of life. Cheap, and called from any thread. That of
a group never raises; what another one raises ends the work."""


def no_beat() -> None:
    """Nobody waits for a sign of life."""


_waited_for: list[Beat] = []
"""Of everything in this process for which other ranks wait."""


@contextmanager
def heard(beat: Beat) -> Iterator[None]:
    """Inside, `alive` on any thread of this process gives this sign of life too."""
    _waited_for.append(beat)
    try:
        yield
    finally:
        _waited_for.remove(beat)


def alive() -> None:
    """Give all signs of life that somebody waits for: a request has been answered, if only by an error, and is made
    again. So a storage in trouble is not taken for the death of a rank, for as long as retries last."""
    for beat in tuple(_waited_for):
        beat()
