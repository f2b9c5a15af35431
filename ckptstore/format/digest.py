"""CRC32C, of whole files and of blocks of 1 MiB, at memory speed and off the interpreter lock.

CRC32C (RFC 3720: Castagnoli polynomial, reflected, initial value and final XOR of all ones) finds damage. It never
decides that two things are equal.
"""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import pairwise
from typing import NamedTuple

BLOCK_BYTES = 1 << 20
"""The size of a block that has a digest of its own; the last block of a payload may be shorter."""

Bytes = bytes | bytearray | memoryview


@cache
def _native() -> tuple[Callable[[Bytes, int], int], Callable[[int, int, int], int]]:
    """The functions of the C library, loaded by the first use; an import in each call costs as much as 10 KiB do."""
    from awscrt import checksums

    return checksums.crc32c, checksums.combine_crc32c


def crc32c(data: Bytes, previous: int = 0) -> int:
    """The CRC32C of `data`, or of what `previous` is the digest of, followed by `data`."""
    return _native()[0](data, previous)


def crc32c_of(views: Iterable[Bytes]) -> int:
    """The CRC32C of the views, one after another."""
    value = 0
    for view in views:
        value = crc32c(view, value)
    return value


def combine(first: int, second: int, second_bytes: int) -> int:
    """The CRC32C of two stretches one after another, from the digest of each and the size of the second."""
    return _native()[1](first, second, second_bytes)


class SegmentDigest(NamedTuple):
    """The digest of a stretch of a file."""

    offset: int
    size_bytes: int
    crc32c: int


def join(segments: Iterable[SegmentDigest | tuple[int, int, int]]) -> int:
    """The digest of the stretch that the segments cover without a gap; 0 for none."""
    total, end = 0, None
    for offset, size_bytes, crc in sorted(segments):
        if end is not None and offset != end:
            raise ValueError(f"the segments have a gap or overlap at {end}")
        total = crc if end is None else combine(total, crc, size_bytes)
        end = offset + size_bytes
    return total


def block_borders(offset: int, size_bytes: int) -> Sequence[int]:
    """Where the blocks of a payload at `offset` begin, and where the last one ends."""
    return [*range(offset, offset + size_bytes, BLOCK_BYTES), offset + size_bytes] if size_bytes else [offset]


def to_hex(value: int) -> str:
    """A digest as the format writes it: 8 lower-case hexadecimal digits."""
    return f"{value:08x}"


class FileDigest:
    """The digests of one file, collected in any order, by several threads, as its bytes pass."""

    def __init__(self, payloads: Sequence[tuple[int, int]] = ()) -> None:
        """`payloads` are the (offset, size_bytes) of the ranges whose blocks get digests; sorted, apart."""
        self._payloads = payloads
        self._cuts = [cut for offset, size in payloads if size for cut in block_borders(offset, size)]
        self._segments: list[tuple[int, int, int]] = []

    def add(self, offset: int, views: Sequence[memoryview]) -> int:
        """Hash the bytes at `offset`, and return the CRC32C of them. Each byte of the file is added exactly once."""
        if not self._cuts:
            total = crc32c_of(views)
            self._segments.append((offset, sum(map(len, views)), total))
            return total
        added: list[tuple[int, int, int]] = []
        index = bisect_right(self._cuts, offset)
        start, total = offset, 0
        for given in views:
            view = given
            while index < len(self._cuts) and len(view) >= (room := self._cuts[index] - offset):
                total = crc32c(view[:room], total)
                view, offset, index = view[room:], offset + room, index + 1
                if offset > start:
                    added.append((start, offset - start, total))
                start, total = offset, 0
            total, offset = crc32c(view, total), offset + len(view)
        if offset > start:
            added.append((start, offset - start, total))
        self._segments += added
        return join(added)

    def crc32c(self) -> int:
        """The digest of the whole file, once all of it was added."""
        return join(self._segments)

    def block_crcs(self) -> tuple[bytes, ...]:
        """For each payload the digests of its blocks of 1 MiB, as little-endian 32-bit integers."""
        if not self._payloads:
            return ()
        segments = iter(sorted(self._segments))
        found = []
        for offset, size_bytes in self._payloads:
            crcs = array("I")
            for start, end in pairwise(block_borders(offset, size_bytes)):
                at, total = start, 0
                while at < end:
                    segment_offset, segment_bytes, segment_crc = next(segments)
                    if segment_offset >= start:
                        total = combine(total, segment_crc, segment_bytes) if at > start else segment_crc
                        at = segment_offset + segment_bytes
                crcs.append(total)
            if sys.byteorder == "big":
                crcs.byteswap()
            found.append(crcs.tobytes())
        return tuple(found)
