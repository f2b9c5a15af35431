"""What loads and resumes tell."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import ClassVar

from ckptstore.events.listeners import Event
from ckptstore.runtime.shown import show_move, show_seconds, show_size


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPhase(Event):
    """A phase of a load has ended on this rank. Not logged."""

    level: ClassVar[int] = logging.NOTSET
    step: int | None
    """None as long as it is not known which checkpoint is loaded."""
    number: int | None
    rank: int
    load: str
    """Which load of this process."""
    phase: str
    """"open" (find out what is stored), "read" (move the bytes) or "apply" (finish modules and optimizers). Of damaged
    checkpoints that were tried before there are phases too."""
    started_at: float
    """When it began, in seconds since the epoch by this machine's clock."""
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadEnded(Event):
    """A load has ended on this rank, well or not. Not logged."""

    level: ClassVar[int] = logging.NOTSET
    step: int | None
    """None when no checkpoint was found."""
    number: int | None
    rank: int
    load: str
    """Which load of this process: that of its phases."""
    store: str
    """The URI, without secrets."""
    started_at: float
    """When it was called, in seconds since the epoch by this machine's clock."""
    seconds: float
    size_bytes: int
    """What this rank read."""
    requests: int
    """Tries of requests to the storage, on this rank."""
    retries: int
    """Those of them that were made again."""
    error_type: str | None
    """The class of the error that it ended with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSkipped(Event):
    """A resume passed over a checkpoint that cannot be used."""

    level: ClassVar[int] = logging.WARNING
    step: int
    number: int | None
    """None for one that no record has: it is on the disks of nodes alone."""
    reason: str

    def line(self) -> str:
        return f"step {self.step} is passed over: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
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
    """When it was committed, in seconds since the epoch by the clock of its leader."""

    def line(self) -> str:
        return f"resumed from step {self.step}"

    def log_level(self) -> int:
        return logging.DEBUG if self.rank else self.level


@dataclass(frozen=True, slots=True, kw_only=True)
class DownloadStarted(Event):
    """This process downloads a checkpoint for its node."""

    step: int
    size_bytes: int

    def line(self) -> str:
        return f"downloading step {self.step}, {show_size(self.size_bytes)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DownloadWaited(Event):
    """This process waited for another one's download."""

    step: int
    holder: str
    seconds: float

    def line(self) -> str:
        return f"waited {show_seconds(self.seconds)} for {self.holder} to download step {self.step}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DownloadFinished(Event):
    """The download is complete and verified."""

    step: int
    size_bytes: int
    seconds: float

    def line(self) -> str:
        return f"step {self.step} downloaded: {show_move(self.size_bytes, self.seconds)}"
