"""What a transfer takes and gives: pure values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ckptstore.errors import CheckpointDamaged, FileMissing


class Stored(NamedTuple):
    """A file that was written."""

    key: str
    size_bytes: int
    crc32c: int
    block_crcs: tuple[bytes, ...] = ()
    """For each payload of the source the CRC32C of each block of 1 MiB, as little-endian 32-bit integers."""


class Wanted(NamedTuple):
    """A whole file to be fetched or checked."""

    key: str
    size_bytes: int
    crc32c: int | None
    """None where no digest is known, so that the size is all that can be compared."""


class Checked(NamedTuple):
    """What was found where a file was wanted."""

    wanted: Wanted
    crc32c: int | None
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
    checks: tuple[tuple[int, int], ...] = ()
    """(size_bytes, crc32c) of consecutive stretches that cover the range together; empty for a read unchecked."""

    @property
    def size_bytes(self) -> int:
        """How many bytes are read."""
        return sum(map(len, self.views))
