"""What one turn takes: seconds, processor time of this process and its children, and memory beside what was there."""

from __future__ import annotations

import gc
import resource
import time
from pathlib import Path
from types import TracebackType

import psutil

from ckptstore.events import Event, RequestRetried, listening
from ckptstore.tools.bench.figures.report import Sample

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


def cpu_seconds() -> float:
    """Processor time of this process and of all that it started, those that still run counted."""
    found = 0.0
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        usage = resource.getrusage(who)
        found += usage.ru_utime + usage.ru_stime
    for child in psutil.Process().children(recursive=True):
        try:
            times = child.cpu_times()
        except psutil.NoSuchProcess:
            continue
        found += times.user + times.system
    return found


def status_bytes(name: str) -> int:
    """VmRSS, VmHWM and the like of this process. Raises OSError or KeyError where there is no such thing."""
    for line in _STATUS.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(name)


class Meter:
    """Measures while its context lasts; `returned` is called when the call that blocks the training is over."""

    blocked_seconds = 0.0
    total_seconds = 0.0
    cpu_seconds = 0.0
    peak_bytes: int | None = None
    retries = 0

    def __enter__(self) -> Meter:
        gc.collect()
        self._before_bytes = self._resident()
        self._listening = listening(self._hear)
        self._listening.__enter__()
        self._cpu = cpu_seconds()
        self._started = time.perf_counter()
        return self

    def returned(self) -> None:
        """The caller may go on, and change its state."""
        self.blocked_seconds = time.perf_counter() - self._started

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.total_seconds = time.perf_counter() - self._started
        self.blocked_seconds = self.blocked_seconds or self.total_seconds
        self.cpu_seconds = cpu_seconds() - self._cpu
        self._listening.__exit__(None, None, None)
        if self._before_bytes is not None:
            self.peak_bytes = max(0, status_bytes("VmHWM") - self._before_bytes)

    def sample(
        self, *, requests: int | None = None, sent_bytes: int | None = None, received_bytes: int | None = None
    ) -> Sample:
        """What was measured, with what a server counted. Only ckptstore tells of its retries."""
        return Sample(
            blocked_seconds=self.blocked_seconds,
            total_seconds=self.total_seconds,
            cpu_seconds=self.cpu_seconds,
            peak_bytes=self.peak_bytes,
            requests=requests,
            sent_bytes=sent_bytes,
            received_bytes=received_bytes,
            retries=self.retries,
        )

    def _hear(self, event: Event) -> None:
        if isinstance(event, RequestRetried):
            self.retries += 1

    @staticmethod
    def _resident() -> int | None:
        """Resident memory now; from here on the high-water mark counts anew. None where Linux is not the system."""
        try:
            _CLEAR.write_text("5")
            return status_bytes("VmRSS")
        except (OSError, KeyError):
            return None
