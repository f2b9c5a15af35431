"""Measure one turn: seconds, processor time of this process and its children, and additional memory."""

from __future__ import annotations

import gc
import resource
import time
from contextlib import suppress
from pathlib import Path

import psutil

from ckptstore.events import Event, RequestRetried, listening
from ckptstore.tools.bench.figures.report import Sample

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


def cpu_seconds() -> float:
    """Return the processor time of this process and of all its children, running ones included."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    found = sum(usage.ru_utime + usage.ru_stime for usage in usages)
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            found += sum(child.cpu_times()[:4])  # its own, and of its children
    return found


def _status_bytes(name: str) -> int:
    """Return VmRSS, VmHWM and the like of this process. Raises OSError or KeyError if the system lacks them."""
    for line in _STATUS.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(name)


class Meter:
    """Measures during its context; call `returned` when the call that blocks the training is over."""

    blocked_seconds = 0.0
    total_seconds = 0.0
    cpu_seconds = 0.0
    peak_bytes: int | None = None
    retries = 0

    def __enter__(self) -> Meter:
        gc.collect()
        self._before_bytes: int | None = None
        with suppress(OSError, KeyError):  # on systems other than Linux
            _CLEAR.write_text("5")  # resets the high-water mark
            self._before_bytes = _status_bytes("VmRSS")
        self._listening = listening(self._on_event)
        self._listening.__enter__()
        self._cpu = cpu_seconds()
        self._started = time.perf_counter()
        return self

    def returned(self) -> None:
        """Note that the caller may go on, and change its state."""
        self.blocked_seconds = time.perf_counter() - self._started

    def __exit__(self, *_: object) -> None:
        self.total_seconds = time.perf_counter() - self._started
        self.blocked_seconds = self.blocked_seconds or self.total_seconds
        self.cpu_seconds = cpu_seconds() - self._cpu
        self._listening.__exit__(None, None, None)
        if self._before_bytes is not None:
            self.peak_bytes = max(0, _status_bytes("VmHWM") - self._before_bytes)

    def sample(self) -> Sample:
        """Return the measurements. Only ckptstore reports retries."""
        return Sample(
            blocked_seconds=self.blocked_seconds,
            total_seconds=self.total_seconds,
            cpu_seconds=self.cpu_seconds,
            peak_bytes=self.peak_bytes,
            retries=self.retries,
        )

    def _on_event(self, event: Event) -> None:
        if isinstance(event, RequestRetried):
            self.retries += 1
