"""The protocol of shards: one rank's contribution to a checkpoint, and the way in which all of them become one.

A transaction (`ckptstore.saving.transaction`) is the same for every kind of checkpoint; the shards differ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from ckptstore.format.layout import Attempt
from ckptstore.format.manifest import Receipt
from ckptstore.format.timings import Timings


class Decision(NamedTuple):
    """The leader's decision on the descriptions of all ranks."""

    told: Any
    """The message to every rank, for `Shard.hear`."""
    size_bytes: int | None
    """The approximate bytes that all ranks together will write; None if the ranks have to describe once more."""
    may_be_less: bool = False
    """True if some of the bytes may be taken over from the checkpoint before."""


class Contents(NamedTuple):
    """The contents of the checkpoint."""

    receipts: Sequence[Receipt]
    directories: Sequence[str] = ()
    """The directories without a file in them."""
    pending: Sequence[str] = ()
    """The names of files that the leader wrote, and that become durable together with the manifest."""
    bases: Sequence[str] = ()
    """The attempts of live checkpoints that this one builds on, beside those in which its files lie."""
    timings: Callable[[], Timings] | None = None
    """A function that builds the timings of the save, called for the manifest; None if they are unknown."""
    casts: Mapping[str, str] = {}
    """The dtypes in which tensors are stored that have another one in the state, by patterns of keys."""
    num_hosts: int | None = None
    """The number of hosts that the ranks run on; None if it is unknown."""


class Plan(Protocol):
    """The part of one rank in a checkpoint, once the ranks agree."""

    def store(self, attempt: Attempt) -> Any:
        """Write this rank's files. Return a value for `join` (see `Meeting.gather`)."""

    def join(self, attempt: Attempt, stored: Sequence[Any]) -> Contents:
        """Leader: return the contents of the checkpoint, with files that describe those of all ranks together."""


class Shard(Protocol):
    """One rank's shard. The methods are called in this order; `decide` on the leader alone."""

    def describe(self) -> Any:
        """Describe what this rank has, or what the leader wants to know besides. Nothing is written yet; may raise."""

    def decide(self, descriptions: Sequence[Any]) -> Decision:
        """Leader: decide who writes what, from the descriptions of all ranks in their order. May raise."""

    def hear(self, told: Any) -> None:
        """Take the leader's decision. Does not raise: the others go on."""

    def plan(self) -> Plan:
        """Plan what this rank writes, by what the leader has decided. May raise."""
