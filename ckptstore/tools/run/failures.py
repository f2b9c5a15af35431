"""The failures of tries in a row: when the next try comes, and the exit code where none does."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field

from ckptstore.errors import CkptstoreError, StoreFenced, StoreForked, UnsupportedVersion

FINAL = (StoreFenced, StoreForked, UnsupportedVersion)
"""Errors that no later try mends."""
_LONGEST_WAIT_SECONDS = 60.0


@dataclass(slots=True)
class Failures:
    """The failed tries in a row."""

    error: CkptstoreError | None = None
    """The last one; None after a try that went well."""
    count: int = 0
    not_before: float = 0.0
    is_final: bool = False
    """True if nothing more is committed."""
    own: Counter[str] = field(default_factory=Counter)
    """The number of those that were a checkpoint's own fault, by name."""

    def delay(self, interval_seconds: float) -> float:
        """Count one more, and return the time to the next try: twice that of before, up to a minute."""
        wait_seconds = min(_LONGEST_WAIT_SECONDS, interval_seconds * 2.0 ** min(self.count, 10))
        self.count += 1
        self.not_before = time.monotonic() + wait_seconds
        return wait_seconds

    @property
    def stopped_code(self) -> int:
        """The exit code for an agent that has ended by itself: that of the final error, or of an unknown one."""
        return self.error.exit_code if self.is_final and self.error is not None else CkptstoreError.exit_code
