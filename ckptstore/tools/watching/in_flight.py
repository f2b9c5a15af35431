"""One attempt over several looks: how fast it grows, how long it will take, and whether anybody still works at it."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from ckptstore.format.layout import Attempt
from ckptstore.tools.watching.attempt_finder import FoundAttempt
from ckptstore.tools.watching.look import AttemptStatus, SeenAttempt

SILENT_SECONDS = 300.0
"""An attempt that has not changed for so long, of a job that gave no sign of life, is not in flight any more."""
_RATE_SECONDS = 30.0
"""The rate is that of so long a time: an object store shows whole files, so bytes come in jumps."""


@dataclass(frozen=True, slots=True)
class ExpectedSize:
    """The guess of what an attempt will store: as much as a checkpoint before."""

    size_bytes: int
    as_step: int


class InFlight:
    """An attempt, followed from look to look. Times are of a clock that is never set."""

    def __init__(self, found: FoundAttempt, *, now: float, age_seconds: float) -> None:
        """`age_seconds` is how long ago its last file was written, as far as clocks of two machines tell."""
        self.found = found
        self._changed_at = now - age_seconds
        self._sizes: deque[tuple[float, int]] = deque([(now, found.size_bytes)])

    @property
    def attempt(self) -> Attempt:
        """Its name."""
        return self.found.attempt

    def look(self, found: FoundAttempt, *, now: float) -> None:
        """Take note of how it is now."""
        if found != self.found:
            self._changed_at = now
        if found.size_bytes < self.found.size_bytes:  # a file is written again
            self._sizes.clear()
        self.found = found
        self._sizes.append((now, found.size_bytes))
        while len(self._sizes) > 2 and self._sizes[1][0] <= now - _RATE_SECONDS:
            self._sizes.popleft()

    def bytes_per_second(self) -> float | None:
        """Return the speed at which it grows, None where nothing has grown."""
        (began, first_bytes), (ended, last_bytes) = self._sizes[0], self._sizes[-1]
        if ended <= began or last_bytes <= first_bytes:
            return None
        return (last_bytes - first_bytes) / (ended - began)

    def seen(self, *, now: float, sign_seconds: float, expected: ExpectedSize | None) -> SeenAttempt:
        """Return it as a value. `sign_seconds` is how long ago its job gave a sign of life, infinite where it gives
        none."""
        found, rate = self.found, self.bytes_per_second()
        silent_seconds = max(0.0, min(now - self._changed_at, sign_seconds))
        missing_bytes = expected.size_bytes - found.size_bytes if expected else 0
        return SeenAttempt(
            attempt=str(self.attempt),
            step=self.attempt.step,
            epoch=self.attempt.epoch,
            status=self._status(silent_seconds),
            num_files=found.num_files,
            size_bytes=found.size_bytes,
            num_uploads=found.num_uploads,
            expected_bytes=expected.size_bytes if expected else None,
            expected_as_step=expected.as_step if expected else None,
            bytes_per_second=rate,
            left_seconds=missing_bytes / rate if rate and missing_bytes > 0 and not found.has_manifest else None,
            silent_seconds=silent_seconds,
        )

    def _status(self, silent_seconds: float) -> AttemptStatus:
        if silent_seconds >= SILENT_SECONDS:
            return "silent"
        return "committing" if self.found.has_manifest else "writing"


NO_SIGN = math.inf
