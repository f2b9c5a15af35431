"""A shard: what one rank contributes to a checkpoint, and how the shards of all ranks become one. A protocol.

A transaction (`ckptstore.saving.transaction`) is the same for every kind of checkpoint; shards are where they differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from ckptstore.format.layout import Attempt
from ckptstore.format.manifest import Receipt
from ckptstore.format.timings import Timings


class Decision(NamedTuple):
    """What the leader makes of all descriptions."""

    told: bytes
    """What every rank has to hear of it."""
    size_bytes: int | None
    """About what all ranks together will write; None while the leader has to know more: all ranks describe again."""
    may_be_less: bool = False
    """Whether some of that may be taken over from the checkpoint before, and not be written."""


class Contents(NamedTuple):
    """What the checkpoint will consist of."""

    receipts: Sequence[Receipt]
    directories: Sequence[str] = ()
    """Directories without a file in them."""
    pending: Sequence[str] = ()
    """Names of files that the leader wrote, and that become durable together with the manifest."""
    timings: Callable[[], Timings] | None = None
    """What the save took, asked for when the manifest is made; None where that is not known."""


class Shard(Protocol):
    """One rank's shard. The story calls the methods in this order; those of the leader on the leader alone."""

    def describe(self) -> bytes:
        """What this rank has, or what the leader wants to know besides. Nothing is written yet; may raise."""

    def decide(self, descriptions: Sequence[bytes]) -> Decision:
        """Leader: who writes what, from the descriptions of all ranks in their order. May raise."""

    def hear(self, told: bytes) -> None:
        """What the leader has decided. Does not raise: the others go on."""

    def store(self, attempt: Attempt) -> bytes:
        """Write this rank's files, and return what the leader needs to know of them."""

    def join(self, attempt: Attempt, stored: Sequence[bytes]) -> Contents:
        """Leader: what all ranks stored, with files that describe them together."""
