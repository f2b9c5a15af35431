"""What happens beside saves and loads."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import ClassVar

from ckptstore.events.listeners import Event
from ckptstore.runtime.shown import show_seconds, show_size


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointsPruned(Event):
    """Checkpoints were deleted for good."""

    steps: tuple[int, ...]
    size_bytes: int
    seconds: float

    def line(self) -> str:
        return (
            f"pruned {len(self.steps)} checkpoints ({_listed(self.steps)}): {show_size(self.size_bytes)} in "
            f"{show_seconds(self.seconds)}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneFailed(Event):
    """Deleting failed; it is tried again after the next commit."""

    level: ClassVar[int] = logging.WARNING
    error: str

    def line(self) -> str:
        return f"deleting from the trash failed, it is tried again after the next commit: {self.error}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRetried(Event):
    """A request to the storage failed and is tried again."""

    level: ClassVar[int] = logging.WARNING
    what: str
    error: str
    attempt: int
    wait_seconds: float

    def line(self) -> str:
        return f"{self.what} failed, try {self.attempt + 1} comes in {show_seconds(self.wait_seconds)}: {self.error}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConcurrencyChanged(Event):
    """A transfer has fewer requests in flight than before, because the storage throttles, or more again."""

    limit: int
    """The most requests in flight from now on."""
    reason: str

    def line(self) -> str:
        return f"at most {self.limit} requests at once from now on: {self.reason}"


def _listed(steps: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, steps[:5]))
    return f"steps {shown}, ..." if len(steps) > 5 else f"step {shown}" if len(steps) == 1 else f"steps {shown}"
