"""The sign of life that whoever works gives to whoever waits."""

from __future__ import annotations

from collections.abc import Callable

Beat = Callable[[], None]
"""Called by whoever does the work whenever bytes have moved: a sign of life. Cheap, and called from any thread. That of
a group never raises; what another one raises ends the work."""


def no_beat() -> None:
    """Nobody waits for a sign of life."""
