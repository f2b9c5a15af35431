"""The signals that an agent takes and hands on, and what else its main thread waits for."""

from __future__ import annotations

import queue
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Literal, Self

from ckptstore.events import emit
from ckptstore.tools.run.notices import FolderNotice, SignalHandedOn
from ckptstore.tools.run.trainer import TrainerProcess

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""After these the end is near."""
HANDED_ON = (*ENDING, signal.SIGUSR1, signal.SIGUSR2)

_WAKE_SECONDS = 0.25
_KILL_SECONDS = 10.0
"""The time that a trainer has to end after a second signal that ends it."""


class Signals:
    """While the context lasts, a signal ends the agent (as long as there is no trainer), or calls `taken`.

    One that was ignored when the agent was started, as by nohup, stays ignored. Of the main thread alone.
    """

    def __init__(self) -> None:
        self.taken: Callable[[int], object] | None = None
        self._before: dict[int, object] = {}

    def __enter__(self) -> Self:
        for number in HANDED_ON:
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


@dataclass(frozen=True, slots=True)
class Happened:
    """The event that the main thread waits for: a signal, the trainer's end with its code, the end of a try to prepare
    a folder that was found late, or that the committer is through."""

    what: Literal["signal", "ended", "prepared", "through"]
    number: int = 0


Happenings = queue.SimpleQueue[Happened]


class Handing:
    """Hands signals on to the trainer. After the second one that ends it, it is killed if it does not end by itself."""

    def __init__(self, trainer: TrainerProcess, happened: Happenings) -> None:
        self.happened = happened
        self.is_ending = False
        self._trainer = trainer
        self._kill_at: float | None = None

    def next(self, until: float | None = None) -> Happened | None:
        """Return what happens next, None when the time is over. What is a signal was handed on."""
        times = [at for at in (until, self._kill_at) if at is not None]
        came = next_of(self.happened, min(times, default=None))
        if came is None and self._kill_at is not None and time.monotonic() >= self._kill_at:
            emit(FolderNotice(text=f"the trainer has not ended {_KILL_SECONDS:g} s after a second signal: killed"))
            self._trainer.hand_on(signal.SIGKILL)
            self._kill_at = None
        elif came is not None and came.what == "signal":
            self._trainer.hand_on(came.number)
            emit(SignalHandedOn(name=signal.Signals(came.number).name))
            if came.number in ENDING:
                if self.is_ending and self._kill_at is None:
                    self._kill_at = time.monotonic() + _KILL_SECONDS
                self.is_ending = True
        return came


def next_of(happened: Happenings, until: float | None = None) -> Happened | None:
    """Return what happens next, None when the time is over. The system may give a signal to another thread; then
    nothing wakes this one, which runs the handlers. So it wakes by itself."""
    while True:
        left = _WAKE_SECONDS if until is None else max(0.0, min(_WAKE_SECONDS, until - time.monotonic()))
        try:
            return happened.get(timeout=left)
        except queue.Empty:
            if until is not None and time.monotonic() >= until:
                return None
