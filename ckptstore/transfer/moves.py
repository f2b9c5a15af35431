"""Pure values that a transfer takes and returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ckptstore.errors import CheckpointDamaged, FileMissing
from ckptstore.format.digest import DEFAULT, Digest
from ckptstore.format.layout import Attempt
from ckptstore.format.manifest import Receipt
from ckptstore.transfer.sources import MemorySource, Source

EXTENT_BYTES = 8 << 20
"""The size of an extent. Extents begin at its multiples, and each has one owner among the nodes."""

FinishedCopy = Callable[[], AbstractContextManager[Path | None]]
"""Yields the directory of a finished copy, which nobody removes in the context; None if there is none any more."""


class PlannedFile(NamedTuple):
    """One file to be written."""

    key: str
    source: Source
    algorithm: str | None = None
    """The algorithm of its digests; None for the configured one."""

    def __str__(self) -> str:
        return f"{self.key} <- {self.source.size_bytes} bytes"


class Stored(NamedTuple):
    """A file that was written."""

    key: str
    size_bytes: int
    digest: Digest
    block_digests: tuple[bytes, ...] = ()
    """The digests of the blocks of 1 MiB of each payload of the source, as little-endian integers."""


Upload = Callable[[Sequence[PlannedFile]], list[Stored]]
"""`Transfer.upload`, or a function that does the same in another way."""


def write_small(
    upload: Upload, attempt: Attempt, written: Mapping[str, tuple[bytes, int]], *, algorithm: str
) -> list[Receipt]:
    """Write small files of an attempt, each of a rank, and return their receipts."""
    files = [
        PlannedFile(attempt.key(name), MemorySource([memoryview(data)]), algorithm)
        for name, (data, _) in written.items()
    ]
    return [
        Receipt(name, one.size_bytes, one.digest, rank)
        for (name, (_, rank)), one in zip(written.items(), upload(files), strict=True)
    ]


class Supplied(NamedTuple):
    """A stretch of one extent, as a node has supplied it."""

    node: str
    offset: int
    size_bytes: int
    digest: str
    """The digest of the bytes that came, whether they are right or not."""


class Wanted(NamedTuple):
    """A whole file to be fetched or checked."""

    key: str
    size_bytes: int
    digest: Digest | None
    """The expected digest; None where it is not known, so that only the size can be compared."""

    @property
    def algorithm(self) -> str:
        """The algorithm that hashes its bytes."""
        return self.digest.algorithm if self.digest else DEFAULT


class Checked(NamedTuple):
    """The result of reading a wanted file."""

    wanted: Wanted
    digest: Digest | None
    """The digest of the bytes found; None where they could not be read to the end."""
    damage: CheckpointDamaged | FileMissing | None
    """The error that says what is wrong, None if nothing is."""


@dataclass(frozen=True, slots=True)
class RangeRead:
    """A stretch of a file to be read straight into existing memory."""

    key: str
    offset: int
    views: tuple[memoryview, ...]
    """Contiguous and writable, of bytes (format "B"); filled one after another."""
    checks: tuple[tuple[int, Digest], ...] = ()
    """(size_bytes, digest) of consecutive stretches that cover the range together; empty for a read unchecked."""

    @property
    def size_bytes(self) -> int:
        """The number of bytes to read."""
        return sum(map(len, self.views))
