"""CRC32C, of whole files and of blocks of 1 MiB, at memory speed and off the interpreter lock.

CRC32C (RFC 3720: Castagnoli polynomial, reflected, initial value and final XOR of all ones) finds damage. It never
decides that two things are equal.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

BLOCK_BYTES = 1 << 20
"""The size of a block that has a digest of its own; the last block of a payload may be shorter."""

Bytes = bytes | bytearray | memoryview


def crc32c(data: Bytes, previous: int = 0) -> int:
    """The CRC32C of `data`, or of what `previous` is the digest of, followed by `data`."""
    from awscrt import checksums

    return int(checksums.crc32c(data, previous))


def combine(first: int, second: int, second_bytes: int) -> int:
    """The CRC32C of two stretches one after another, from the digest of each and the size of the second."""
    from awscrt import checksums

    return int(checksums.combine_crc32c(first, second, second_bytes))


class Segment(NamedTuple):
    """The digest of a stretch of a file."""

    offset: int
    size_bytes: int
    crc32c: int


def join(segments: Iterable[Segment]) -> int:
    """The digest of the stretch that the segments cover without a gap; 0 for none."""
    total, end = 0, None
    for segment in sorted(segments):
        if end is not None and segment.offset != end:
            raise ValueError(f"the segments have a gap or overlap at {end}")
        total = segment.crc32c if end is None else combine(total, segment.crc32c, segment.size_bytes)
        end = segment.offset + segment.size_bytes
    return total


def block_borders(offset: int, size_bytes: int) -> Sequence[int]:
    """Where the blocks of a payload at `offset` begin, and where the last one ends."""
    return [*range(offset, offset + size_bytes, BLOCK_BYTES), offset + size_bytes] if size_bytes else [offset]


def to_hex(value: int) -> str:
    """A digest as the format writes it: 8 lower-case hexadecimal digits."""
    return f"{value:08x}"
