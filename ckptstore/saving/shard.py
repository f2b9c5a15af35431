"""A shard: what one rank contributes to a checkpoint, and how the shards of all ranks become one. A protocol.

The save story (`ckptstore.saving.story`) is the same for every kind of checkpoint; a shard is where the kinds differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from ckptstore.format.layout import Attempt
from ckptstore.format.manifest import Receipt
from ckptstore.group import Beat
from ckptstore.saving.request import Request


class Agreed(NamedTuple):
    """What the leader makes of all descriptions."""

    told: bytes
    """What every rank needs to know to store its shard."""
    size_bytes: int
    """What all ranks together will write."""


class Contents(NamedTuple):
    """What the checkpoint will consist of."""

    receipts: Sequence[Receipt]
    directories: Sequence[str] = ()
    """Directories without a file in them."""
    pending: Sequence[str] = ()
    """Names of files that the leader wrote, and that become durable together with the manifest."""


class Shard(Protocol):
    """One rank's shard. The story calls the methods in this order; those of the leader on the leader alone."""

    step: Any
    """What the caller gave as the step, not checked yet."""

    def describe(self) -> tuple[Request, bytes]:
        """What the caller asked for, checked, and what this rank has. Nothing is written yet; may raise."""

    def agree(self, descriptions: Sequence[bytes]) -> Agreed:
        """Leader: who writes what, from the descriptions of all ranks in their order. May raise."""

    def store(self, attempt: Attempt, told: bytes, beat: Beat) -> bytes:
        """Write this rank's files, and return what the leader needs to know of them."""

    def join(self, attempt: Attempt, stored: Sequence[bytes], beat: Beat) -> Contents:
        """Leader: what all ranks stored, with files that describe them together."""
