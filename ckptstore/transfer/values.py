"""What a transfer takes and gives: pure values."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stored:
    """A file that was written."""

    key: str
    size_bytes: int
    crc32c: int
    block_crcs: tuple[bytes, ...] = ()
    """For each payload of the source the CRC32C of each block of 1 MiB, as little-endian 32-bit integers."""
    version: str | None = None
    """The storage's mark of these contents, None where it gives none when it writes."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A whole file to be fetched or checked."""

    key: str
    size_bytes: int
    crc32c: int


@dataclass(frozen=True, slots=True)
class RangeRead:
    """A stretch of a file to be read straight into memory that exists."""

    key: str
    offset: int
    views: tuple[memoryview, ...]
    """Contiguous and writable, of bytes (format "B"); filled one after another."""
    checks: tuple[tuple[int, int], ...] = ()
    """(size_bytes, crc32c) of consecutive stretches that cover the range together; empty for a read unchecked."""
    version: str | None = None
    """The file must still be this version; None for any."""

    @property
    def size_bytes(self) -> int:
        """How many bytes are read."""
        return sum(map(len, self.views))
