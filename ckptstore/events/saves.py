"""Define the events of saves."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import field

from ckptstore.events.listeners import EndEvent, Event, event
from ckptstore.runtime.shown import show_move, show_seconds


@event(level=logging.DEBUG)
class SaveStarted(Event):
    """A rank begins to write what the ranks have agreed on."""

    step: int
    attempt: str
    rank: int
    num_files: int
    size_bytes: int


@event(level=logging.DEBUG)
class StateStaged(Event):
    """An asynchronous save holds a copy of the state; training goes on."""

    step: int
    rank: int
    size_bytes: int
    seconds: float


@event(level=logging.NOTSET)
class BytesMoved(Event):
    """Progress of a transfer, several times for a large file. Not logged."""

    key: str
    size_bytes: int
    total_bytes: int
    """The size of the whole transfer that this belongs to."""


@event(level=logging.DEBUG)
class FileStored(Event):
    """One file is stored."""

    key: str
    size_bytes: int
    seconds: float
    rank: int


@event(level=logging.NOTSET)
class SavePhase(Event):
    """A phase of a save has ended on this rank. Not logged."""

    step: int
    attempt: str
    rank: int
    phase: str
    """"agree", "stage" (asynchronous saves alone), "upload", "wait" or "commit"."""
    started_at: float
    """Its begin, in seconds since the epoch by this machine's clock."""
    seconds: float


@event()
class CheckpointEvent(Event):
    """The root of the events of a checkpoint that is complete, in the store or on nodes."""

    step: int
    rank: int
    size_bytes: int
    """On all ranks together, each file once."""
    seconds: float
    """From the call of the save to its end, the wait for a copy in the background included. Of a fast checkpoint that
    came into the store: how long that took."""
    world_size: int = 1
    slowest_rank: int | None = None
    """The rank that took longest to store its files; None with one rank, and where it is not known."""
    slowest_by_seconds: float = 0.0
    """The time that it took beyond the rank in the middle."""
    store: str = ""
    """The root of the store, without secrets."""
    attempt: str = ""
    """The name of its directory below `checkpoints/` in the store."""
    metrics: Mapping[str, float] = field(default_factory=dict, hash=False)

    def slowest(self) -> str:
        """Return the end of its line, about the slowest rank; empty where that is not known."""
        if self.slowest_rank is None:
            return ""
        return f", slowest rank {self.slowest_rank} by {show_seconds(self.slowest_by_seconds)}"


@event(only_rank_0=True)
class CheckpointCommitted(CheckpointEvent):
    """A checkpoint is visible. The log of rank 0 has its line at INFO, that of others at DEBUG."""

    number: int
    manifest_sha256: str = ""
    """The SHA-256 that its record has. It tells the checkpoint from any other one."""
    created_at: float = 0.0
    """Seconds since the epoch by the leader's clock."""

    def line(self) -> str:
        ranks = f", {self.world_size} ranks" if self.world_size > 1 else ""
        return f"step {self.step} saved: {show_move(self.size_bytes, self.seconds)}{ranks}{self.slowest()}"


@event(level=logging.ERROR, line="step {step} was not saved: {error}")
class SaveFailed(Event):
    """A save ended with an error."""

    step: int
    rank: int
    error: str


@event(level=logging.NOTSET)
class SaveEnded(EndEvent):
    """A save has ended on this rank, well or not. Not logged."""

    step: int
    attempt: str
    """Empty when the ranks have not agreed on one."""
    stalled_seconds: float
    """The part of that by which the training was held up: all of it, but for a save in the background."""
    in_background: bool
    is_fast: bool = False
    """True if it went to the disks of nodes: then it is not in the store (yet)."""


@event(level=logging.WARNING, line="step {step} is the first save of this job, and step {latest_step} is there. {hint}")
class ResumeForgotten(Event):
    """A job that did not resume makes its first save, and the store's latest checkpoint is of this or a later step."""

    step: int
    latest_step: int
    hint: str
