"""What is told of fast checkpoints on their way into the store, beside the events of the store."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import ClassVar

from ckptstore.events import Event
from ckptstore.runtime.shown import show_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainStarted(Event):
    """A rank begins to bring its files of a fast checkpoint into the store."""

    level: ClassVar[int] = logging.DEBUG
    step: int
    attempt: str
    rank: int
    num_files: int
    """Of this rank."""
    size_bytes: int
    """Of this rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainEnded(Event):
    """A fast checkpoint is in the store, or a newer one is. `CheckpointCommitted` came before, where this one is."""

    level: ClassVar[int] = logging.DEBUG
    step: int
    attempt: str
    rank: int
    number: int
    """The record of the checkpoint that is there."""
    is_superseded: bool
    """Whether that is a newer one, so that this one has no record."""
    size_bytes: int
    """What this rank sent."""
    seconds: float
    """Since `DrainStarted`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainFailed(Event):
    """A fast checkpoint does not come into the store. Training goes on, and the next one that is due is drained."""

    level: ClassVar[int] = logging.ERROR
    step: int
    attempt: str
    rank: int
    error: str

    def line(self) -> str:
        return f"step {self.step} does not come into the store: {self.error}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainStalled(Event):
    """The store does not answer: nothing becomes durable. It is tried again for as long as the job lives. The log of
    rank 0 has its line at WARNING, that of others at DEBUG."""

    level: ClassVar[int] = logging.WARNING
    step: int
    attempt: str
    rank: int
    error: str

    def log_level(self) -> int:
        return logging.DEBUG if self.rank else self.level

    def line(self) -> str:
        return f"step {self.step} cannot come into the store now, it is tried again: {self.error}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainRecovered(Event):
    """The store answers again, and a checkpoint is durable. Logged as `DrainStalled` is, at INFO."""

    step: int
    attempt: str
    rank: int
    seconds: float
    """Since `DrainStalled`."""

    def log_level(self) -> int:
        return logging.DEBUG if self.rank else self.level

    def line(self) -> str:
        return f"step {self.step} came into the store, {show_seconds(self.seconds)} after that failed first"
