"""Simulate the line between a server and all its clients: bandwidth each way, and a latency."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Literal

Direction = Literal["in", "out"]


@dataclass(slots=True, kw_only=True)
class Link:
    """The line that all connections share. Bodies are counted; heads, and answers of up to 64 KiB, are not."""

    bytes_per_second: float | None = None
    """Each way; None for no limit."""
    latency_seconds: float = 0.0
    """The wait of each request before its answer."""
    _free_at: dict[Direction, float] = field(default_factory=lambda: {"in": 0.0, "out": 0.0})

    def __post_init__(self) -> None:
        """Raise ValueError for impossible values."""
        if self.bytes_per_second is not None and not self.bytes_per_second > 0:
            raise ValueError(f"bytes_per_second is {self.bytes_per_second!r}, it must be above 0")
        if not self.latency_seconds >= 0:
            raise ValueError(f"latency_seconds is {self.latency_seconds!r}, it must not be below 0")

    def wait_seconds(self, direction: Direction, size_bytes: int) -> float:
        """Return the time until these bytes, and all before them, have passed."""
        if self.bytes_per_second is None:
            return 0.0
        now = time.monotonic()
        self._free_at[direction] = max(self._free_at[direction], now) + size_bytes / self.bytes_per_second
        return self._free_at[direction] - now
