"""Define the events of saves to the disks of nodes, and of drains of their checkpoints into the store."""

from __future__ import annotations

import logging

from ckptstore.events.listeners import Event, event
from ckptstore.events.saves import CheckpointEvent
from ckptstore.runtime.shown import show_move, show_seconds


@event(only_rank_0=True)
class FastCommitted(CheckpointEvent):
    """A fast checkpoint is whole on the nodes, and not in the store (yet). The log of rank 0 has its line at INFO."""

    num_nodes: int
    """The number of nodes that hold the files."""
    save_number: int
    """Its number among the saves of its job."""

    def line(self) -> str:
        move = show_move(self.size_bytes, self.seconds)
        return f"step {self.step} is on the disks of {self.num_nodes} nodes: {move}{self.slowest()}"


@event(level=logging.WARNING, line="step {step} goes to the store directly, as nodes do not take it: {error}")
class FastBypassed(Event):
    """A disk of a node is full, or another node cannot be reached, so a save goes to the store directly."""

    step: int
    rank: int
    error: str
    store: str = ""
    """The root of the store, without secrets."""


@event()
class DrainEvent(Event):
    """The root of the events of a fast checkpoint on its way into the store."""

    step: int
    attempt: str
    rank: int
    store: str = ""
    """The root of the store, without secrets."""


@event(level=logging.DEBUG)
class DrainStarted(DrainEvent):
    """A rank begins to bring its files of a fast checkpoint into the store."""

    num_files: int
    """On this rank."""
    size_bytes: int
    """On this rank."""


@event(level=logging.DEBUG)
class DrainEnded(DrainEvent):
    """A fast checkpoint is in the store, or a newer one is. `CheckpointCommitted` came before, where this one is."""

    number: int
    """The record of the checkpoint that is there."""
    is_superseded: bool
    """True if that is a newer one, so that this one has no record."""
    size_bytes: int
    """Sent by this rank."""
    seconds: float
    """Since `DrainStarted`."""


@event(level=logging.ERROR, line="step {step} does not come into the store: {error}")
class DrainFailed(DrainEvent):
    """A fast checkpoint does not come into the store. Training goes on, and the next one that is due is drained."""

    error: str


@event(
    level=logging.WARNING,
    only_rank_0=True,
    line="step {step} cannot come into the store now, it is tried again: {error}",
)
class DrainStalled(DrainEvent):
    """The store does not answer: nothing becomes durable. It is tried again for as long as the job lives. The log of
    rank 0 has its line at WARNING, that of others at DEBUG."""

    error: str


@event(only_rank_0=True)
class DrainRecovered(DrainEvent):
    """The store answers again, and a checkpoint is durable. Logged as `DrainStalled` is, at INFO."""

    seconds: float
    """Since `DrainStalled`."""

    def line(self) -> str:
        return f"step {self.step} came into the store, {show_seconds(self.seconds)} after that failed first"
