"""What saves tell."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from ckptstore.events.listeners import Event
from ckptstore.runtime.shown import show_move, show_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveStarted(Event):
    """A rank begins to write what the ranks have agreed on."""

    level: ClassVar[int] = logging.DEBUG
    step: int
    attempt: str
    rank: int
    num_files: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StateStaged(Event):
    """An asynchronous save holds a copy of the state; training goes on."""

    level: ClassVar[int] = logging.DEBUG
    step: int
    rank: int
    size_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BytesMoved(Event):
    """Progress of a transfer, several times for a large file. Not logged."""

    level: ClassVar[int] = logging.NOTSET
    key: str
    size_bytes: int
    total_bytes: int
    """Of the whole transfer that this belongs to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileStored(Event):
    """One file is stored."""

    level: ClassVar[int] = logging.DEBUG
    key: str
    size_bytes: int
    seconds: float
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SavePhase(Event):
    """A phase of a save has ended on this rank. Not logged."""

    level: ClassVar[int] = logging.NOTSET
    step: int
    attempt: str
    rank: int
    phase: str
    """"agree", "stage" (asynchronous saves alone), "upload", "wait" or "commit"."""
    started_at: float
    """When it began, in seconds since the epoch by this machine's clock."""
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointCommitted(Event):
    """A checkpoint is visible. The log of rank 0 has its line at INFO, that of others at DEBUG."""

    step: int
    number: int
    rank: int
    size_bytes: int
    """Of all ranks together."""
    seconds: float
    """From the call of the save to its end, the wait for a copy in the background included. Of a fast checkpoint: how
    long it took to bring it into the store."""
    world_size: int = 1
    slowest_rank: int | None = None
    """The rank that took longest to store its files; None with one rank, and where it is not known."""
    slowest_by_seconds: float = 0.0
    """How much longer it took than the rank in the middle."""
    store: str = ""
    """The root of the store, without secrets."""
    attempt: str = ""
    """The name of its directory below `checkpoints/` in the store."""
    manifest_sha256: str = ""
    """As the record has it: what tells the checkpoint from any other one."""
    created_at: float = 0.0
    """Seconds since the epoch by the leader's clock."""
    metrics: Mapping[str, float] = field(default_factory=dict, hash=False)

    def log_level(self) -> int:
        return logging.DEBUG if self.rank else self.level

    def line(self) -> str:
        text = f"step {self.step} saved: {show_move(self.size_bytes, self.seconds)}"
        if self.world_size > 1:
            text += f", {self.world_size} ranks"
        if self.slowest_rank is not None:
            text += f", slowest rank {self.slowest_rank} by {show_seconds(self.slowest_by_seconds)}"
        return text


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveFailed(Event):
    """A save ended with an error."""

    level: ClassVar[int] = logging.ERROR
    step: int
    rank: int
    error: str

    def line(self) -> str:
        return f"step {self.step} was not saved: {self.error}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveEnded(Event):
    """A save has ended on this rank, well or not. Not logged."""

    level: ClassVar[int] = logging.NOTSET
    step: int
    attempt: str
    """Empty when the ranks have not agreed on one."""
    rank: int
    store: str
    """The URI, without secrets."""
    started_at: float
    """When it was called, in seconds since the epoch by this machine's clock."""
    seconds: float
    """From the call to the end, on this rank."""
    stalled_seconds: float
    """How much of that the training was held up: all of it, but for a save in the background."""
    in_background: bool
    size_bytes: int
    """What this rank stored."""
    requests: int
    """Tries of requests to the storage, on this rank."""
    retries: int
    """Those of them that were made again."""
    error_type: str | None
    """The class of the error that it ended with."""
    is_fast: bool = False
    """Whether it went to the disks of nodes: then it is not in the store (yet)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeForgotten(Event):
    """A job that did not resume makes its first save, and the store's latest checkpoint is of this or a later step."""

    level: ClassVar[int] = logging.WARNING
    step: int
    latest_step: int
    hint: str

    def line(self) -> str:
        return f"step {self.step} is the first save of this job, and step {self.latest_step} is there. {self.hint}"
