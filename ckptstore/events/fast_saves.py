"""What saves to the disks of nodes tell, and how their checkpoints come into the store."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from ckptstore.events.listeners import Event
from ckptstore.runtime.shown import show_move, show_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class FastCommitted(Event):
    """A fast checkpoint is whole on the nodes, and not in the store (yet). The log of rank 0 has its line at INFO."""

    step: int
    attempt: str
    rank: int
    size_bytes: int
    """Of all ranks together, each file once."""
    seconds: float
    """From the call of the save to its end, the wait for a copy in the background included."""
    world_size: int
    num_nodes: int
    """On how many nodes the files lie."""
    slowest_rank: int | None
    """The rank that took longest to store its files; None with one rank, and where it is not known."""
    slowest_by_seconds: float
    """How much longer it took than the rank in the middle."""
    save_number: int
    """Its number among the saves of its job."""
    store: str
    """The root of the store that it belongs to, without secrets."""
    metrics: Mapping[str, float] = field(default_factory=dict, hash=False)

    def log_level(self) -> int:
        return logging.DEBUG if self.rank else self.level

    def line(self) -> str:
        text = f"step {self.step} is on the disks of {self.num_nodes} nodes: {show_move(self.size_bytes, self.seconds)}"
        if self.slowest_rank is not None:
            text += f", slowest rank {self.slowest_rank} by {show_seconds(self.slowest_by_seconds)}"
        return text


@dataclass(frozen=True, slots=True, kw_only=True)
class FastBypassed(Event):
    """A disk of a node is full, or another node cannot be reached, so a save goes to the store directly."""

    level: ClassVar[int] = logging.WARNING
    step: int
    rank: int
    error: str
    store: str = ""
    """The root of the store, without secrets."""

    def line(self) -> str:
        return f"step {self.step} goes to the store directly, as nodes do not take it: {self.error}"


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
    store: str = ""
    """The root of the store, without secrets."""


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
    store: str = ""
    """The root of the store, without secrets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainFailed(Event):
    """A fast checkpoint does not come into the store. Training goes on, and the next one that is due is drained."""

    level: ClassVar[int] = logging.ERROR
    step: int
    attempt: str
    rank: int
    error: str
    store: str = ""
    """The root of the store, without secrets."""

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
    store: str = ""
    """The root of the store, without secrets."""

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
    store: str = ""
    """The root of the store, without secrets."""

    def log_level(self) -> int:
        return logging.DEBUG if self.rank else self.level

    def line(self) -> str:
        return f"step {self.step} came into the store, {show_seconds(self.seconds)} after that failed first"
