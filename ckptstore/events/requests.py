"""Define the events of requests and of pruning."""

from __future__ import annotations

import logging

from ckptstore.events.listeners import Event, event
from ckptstore.runtime.shown import show_seconds, show_size


@event()
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


@event(level=logging.WARNING, line="deleting from the trash failed, it is tried again after the next commit: {error}")
class PruneFailed(Event):
    """Deleting failed; it is tried again after the next commit."""

    error: str


@event(level=logging.WARNING)
class DiskFillsUp(Event):
    """The disk of the store has room for few more saves, if it goes on growing as with the last ones."""

    step: int
    """The last one that was saved."""
    saves_left: int
    free_bytes: int
    bytes_per_save: int
    """The bytes that the last saves brought, without those that were deleted meanwhile, for each of them."""

    def line(self) -> str:
        free, grows = show_size(self.free_bytes), show_size(self.bytes_per_save)
        return (
            f"the disk of the store is full in about {self.saves_left} saves: {free} are free, and each takes {grows}"
        )


@event(level=logging.WARNING)
class RequestRetried(Event):
    """A request to the storage failed and is tried again."""

    what: str
    error: str
    attempt: int
    wait_seconds: float

    def line(self) -> str:
        return f"{self.what} failed, try {self.attempt + 1} comes in {show_seconds(self.wait_seconds)}: {self.error}"


@event(line="at most {limit} requests at once from now on: {reason}")
class ConcurrencyChanged(Event):
    """A transfer has fewer requests in flight than before, because the storage throttles, or more again."""

    limit: int
    """The most requests in flight from now on."""
    reason: str


@event(level=logging.WARNING, line="{node} is not asked for bytes of checkpoints for {seconds:.0f} s: {reason}")
class PeerLeftOut(Event):
    """Another node had trouble, or gave wrong bytes: the storage is read, and the other nodes asked."""

    node: str
    seconds: float
    """The time until it is asked again."""
    reason: str


def _listed(steps: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, steps[:5]))
    return f"steps {shown}, ..." if len(steps) > 5 else f"step {shown}" if len(steps) == 1 else f"steps {shown}"
