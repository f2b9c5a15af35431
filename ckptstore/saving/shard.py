"""The protocol of shards: one rank's contribution to a checkpoint, and the way in which all of them become one.

A transaction (`ckptstore.saving.transaction`) is the same for every kind of checkpoint; the shards differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from ckptstore.format.layout import Attempt
from ckptstore.format.manifest import Receipt
from ckptstore.format.timings import Timings


class Decision(NamedTuple):
    """The leader's decision on the descriptions of all ranks."""

    told: bytes
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
    timings: Callable[[], Timings] | None = None
    """A function that builds the timings of the save, called for the manifest; None if they are unknown."""


class Shard(Protocol):
    """One rank's shard. A transaction calls the methods in this order, those marked "Leader" on the leader alone."""

    def describe(self) -> bytes:
        """Return a description of this rank's data for the leader; in later rounds, the details it needs besides.

        Nothing is written yet; may raise.
        """

    def decide(self, descriptions: Sequence[bytes]) -> Decision:
        """Leader: decide who writes what, from the descriptions of all ranks in their order. May raise."""

    def hear(self, told: bytes) -> None:
        """Accept the leader's decision. Must not raise: the other ranks go on."""

    def store(self, attempt: Attempt) -> bytes:
        """Write this rank's files, and return their description for the leader."""

    def join(self, attempt: Attempt, stored: Sequence[bytes]) -> Contents:
        """Leader: combine the results of `store` of all ranks, and write the files that describe them together."""
