"""The signals that an agent takes and hands on."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType
from typing import Self

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""After these the end is near."""
_TAKEN = (*ENDING, signal.SIGUSR1, signal.SIGUSR2)


class Signals:
    """While the context lasts, a signal ends the agent (as long as there is no trainer), or calls `taken`.

    One that was ignored when the agent was started, as by nohup, stays ignored. Of the main thread alone.
    """

    def __init__(self) -> None:
        self.taken: Callable[[int], object] | None = None
        self._before: dict[int, object] = {}

    def __enter__(self) -> Self:
        for number in _TAKEN:
            before = signal.getsignal(number)
            if before is not signal.SIG_IGN:
                self._before[number] = before
                signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)  # type: ignore[arg-type]

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self.taken is not None:
            self.taken(number)
        elif number in ENDING:
            raise SystemExit(128 + number)
