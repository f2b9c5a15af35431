"""Pure values that a transfer takes and returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from ckptstore.errors import CheckpointDamaged, FileMissing
from ckptstore.format.digest import DEFAULT, Digest
from ckptstore.transfer.sources import Source


class PlannedFile(NamedTuple):
    """One file to be written."""

    key: str
    source: Source
    algorithm: str | None = None
    """The algorithm of its digests; None for that of the configuration."""

    def __str__(self) -> str:
        return f"{self.key} <- {self.source.size_bytes} bytes"


class Stored(NamedTuple):
    """A file that was written."""

    key: str
    size_bytes: int
    digest: Digest
    block_digests: tuple[bytes, ...] = ()
    """For each payload of the source the digest of each block of 1 MiB, as little-endian integers."""


class Upload(Protocol):
    """`Transfer.upload`, or a function that does the same in another way."""

    def __call__(self, files: Sequence[PlannedFile]) -> list[Stored]:
        """Write the files; the result has their order."""


class Wanted(NamedTuple):
    """A whole file to be fetched or checked."""

    key: str
    size_bytes: int
    digest: Digest | None
    """None where no digest is known, so that the size is all that can be compared."""

    @property
    def algorithm(self) -> str:
        """By which its bytes are hashed."""
        return self.digest.algorithm if self.digest else DEFAULT


class Checked(NamedTuple):
    """What was found where a file was wanted."""

    wanted: Wanted
    digest: Digest | None
    """Of the bytes found; None where they could not be read to the end."""
    damage: CheckpointDamaged | FileMissing | None
    """What is wrong, None if nothing."""


@dataclass(frozen=True, slots=True)
class RangeRead:
    """A stretch of a file to be read straight into memory that exists."""

    key: str
    offset: int
    views: tuple[memoryview, ...]
    """Contiguous and writable, of bytes (format "B"); filled one after another."""
    checks: tuple[tuple[int, Digest], ...] = ()
    """(size_bytes, digest) of consecutive stretches that cover the range together; empty for a read unchecked."""

    @property
    def size_bytes(self) -> int:
        """How many bytes are read."""
        return sum(map(len, self.views))
