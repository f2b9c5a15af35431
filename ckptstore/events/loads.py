"""Define the events of loads and resumes."""

from __future__ import annotations

import logging

from ckptstore.events.listeners import EndEvent, Event, event
from ckptstore.runtime.shown import show_move, show_seconds, show_size


@event(level=logging.NOTSET)
class LoadPhase(Event):
    """A phase of a load has ended on this rank. Not logged."""

    step: int | None
    """None as long as it is not known which checkpoint is loaded."""
    number: int | None
    rank: int
    load: str
    """The name of the load in this process."""
    phase: str
    """"open" (find out what is stored), "read" (move the bytes) or "apply" (finish modules and optimizers). For damaged
    checkpoints that were tried before there are phases too."""
    started_at: float
    """Its begin, in seconds since the epoch by this machine's clock."""
    seconds: float


@event(level=logging.NOTSET)
class LoadEnded(EndEvent):
    """A load has ended on this rank, well or not. Not logged."""

    step: int | None
    """None when no checkpoint was found."""
    number: int | None
    load: str
    """The name of the load in this process, as its phases have it."""


@event(level=logging.WARNING, line="step {step} is passed over: {reason}")
class CheckpointSkipped(Event):
    """A resume passed over a checkpoint that cannot be used, or a follower one that was removed before its turn."""

    step: int
    number: int | None
    """None for one that no record has: it is on the disks of nodes alone."""
    reason: str


@event(only_rank_0=True, line="resumed from step {step}")
class CheckpointResumed(Event):
    """A job goes on from a checkpoint. The log of rank 0 has its line at INFO, that of others at DEBUG."""

    step: int
    number: int | None
    """None for one that no record has: it is on the disks of nodes alone."""
    rank: int
    epoch: int
    store: str
    """The URI, without secrets."""
    created_at: float
    """The time of its commit, in seconds since the epoch by the clock of its leader."""


@event()
class DownloadStarted(Event):
    """This process downloads a checkpoint for its node."""

    step: int
    size_bytes: int

    def line(self) -> str:
        return f"downloading step {self.step}, {show_size(self.size_bytes)}"


@event()
class DownloadWaited(Event):
    """This process waited for another one's download."""

    step: int
    holder: str
    seconds: float

    def line(self) -> str:
        return f"waited {show_seconds(self.seconds)} for {self.holder} to download step {self.step}"


@event()
class DownloadFinished(Event):
    """The download is complete and verified."""

    step: int
    size_bytes: int
    seconds: float

    def line(self) -> str:
        return f"step {self.step} downloaded: {show_move(self.size_bytes, self.seconds)}"
