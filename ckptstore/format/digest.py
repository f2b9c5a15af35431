"""Digests of whole files and of blocks of 1 MiB, at memory speed and off the interpreter lock.

All details of the algorithms are in this file. A digest finds damage. It never proves that two contents are equal: a
`fingerprint` does.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

from ckptstore.errors import UnsupportedVersion

BLOCK_BYTES = 1 << 20
"""The size of a block that has a digest of its own; the last block of a payload may be shorter."""

Bytes = bytes | bytearray | memoryview

DEFAULT = "crc32c"
STRUCTURES = "crc32c"
"""The algorithm of the checksums inside structures of the format, 4 bytes long; files may have another one."""


class Stream(Protocol):
    """The digest of bytes that come one after another."""

    def update(self, data: Bytes) -> None:
        """Add the next bytes."""

    def intdigest(self) -> int:
        """Return the digest of all bytes so far as a number."""


@dataclass(frozen=True, slots=True)
class Algorithm:
    """The properties and functions of an algorithm."""

    title: str
    """The name that people use."""
    code: int
    """The number in the format for columns of its digests."""
    size_bytes: int
    begin: Callable[[], Stream]
    combine: Callable[[int, int, int], int] | None = None
    """Computes the digest of two adjacent stretches from both digests and the size of the second; None if that is
    impossible."""


@cache
def _native() -> tuple[Callable[[Bytes, int], int], Callable[[int, int, int], int]]:
    """Return the functions of the C library, loaded on first use."""
    from awscrt import checksums  # in each call the import would cost as much as 10 KiB do

    return checksums.crc32c, checksums.combine_crc32c


class _Crc32c:
    """CRC32C (RFC 3720: Castagnoli polynomial, reflected, initial value and final XOR of all ones)."""

    __slots__ = ("_value",)

    def __init__(self) -> None:
        self._value = 0

    def update(self, data: Bytes) -> None:
        self._value = _native()[0](data, self._value)

    def intdigest(self) -> int:
        return self._value


class Fingerprinter(Stream, Protocol):
    """XXH3-128, in the form of the hashes of `hashlib`."""

    def digest(self) -> bytes:
        """Return the fingerprint, 16 bytes."""

    def hexdigest(self) -> str:
        """Return the fingerprint in hexadecimal."""


@cache
def _xxh3() -> Callable[[Bytes], Fingerprinter]:
    import xxhash

    return xxhash.xxh3_128


def fingerprinter(data: Bytes = b"") -> Fingerprinter:
    """Return a hash of 128 bits, begun with some bytes. Contents with equal fingerprints count as equal."""
    return _xxh3()(data)  # not cryptographic: nobody gains by making two contents of a store collide


def fingerprint(data: Bytes) -> bytes:
    """Return the fingerprint of some bytes."""
    return fingerprinter(data).digest()


ALGORITHMS: Mapping[str, Algorithm] = {
    "crc32c": Algorithm("CRC32C", 0, 4, _Crc32c, lambda first, second, size: _native()[1](first, second, size)),
    "xxh3-128": Algorithm("XXH3-128", 1, 16, fingerprinter),
}
"""All algorithms, by their names in the format."""

_TEXT = re.compile("([a-z0-9-]{1,32}):([0-9a-f]{1,128})")


def algorithm_of_code(code: int, *, file: str) -> str:
    """Return the name of the algorithm of a column. Raises UnsupportedVersion, naming `file`, for an unknown code."""
    for name, algorithm in ALGORITHMS.items():
        if algorithm.code == code:
            return name
    raise UnsupportedVersion(f"{file} has digests of an unknown kind, {code}", file=file, hint="Upgrade ckptstore")


class Digest(NamedTuple):
    """The digest of some bytes. Two are equal if algorithm and value are."""

    algorithm: str
    value: int

    @staticmethod
    def of(*views: Bytes, algorithm: str = DEFAULT) -> Digest:
        """Return the digest of the views, one after another."""
        stream = ALGORITHMS[algorithm].begin()
        for view in views:
            stream.update(view)
        return Digest(algorithm, stream.intdigest())

    def like(self, *views: Bytes) -> Digest:
        """Return the digest of other bytes by the same algorithm."""
        return Digest.of(*views, algorithm=self.algorithm)

    def followed_by(self, second: Digest, size_bytes: int) -> Digest:
        """Return the digest of two adjacent stretches, this one and `second`, which has that size."""
        return Digest(self.algorithm, _combined(self.algorithm, self.value, second.value, size_bytes))

    @property
    def hex(self) -> str:
        """The value in lower-case hexadecimal digits, as many as the algorithm has."""
        return f"{self.value:0{2 * ALGORITHMS[self.algorithm].size_bytes}x}"

    @property
    def title(self) -> str:
        """The name of the algorithm for people."""
        return ALGORITHMS[self.algorithm].title

    @property
    def shown(self) -> str:
        """The digest as messages have it."""
        return f"{self.title} {self.hex}"

    def __str__(self) -> str:
        """Return the text of the digest in JSON of the format."""
        return f"{self.algorithm}:{self.hex}"

    @staticmethod
    def parse(text: Any) -> Digest:
        """Read the text of a digest. Raises ValueError, and UnsupportedVersion for an unknown algorithm."""
        found = _TEXT.fullmatch(text) if isinstance(text, str) else None
        if found is None:
            raise ValueError("a digest is not the name of an algorithm and lower-case hexadecimal digits")
        algorithm = ALGORITHMS.get(found[1])
        if algorithm is None:
            raise UnsupportedVersion(
                f"There are digests by {found[1]}, which this ckptstore does not know", hint="Upgrade ckptstore"
            )
        if len(found[2]) != 2 * algorithm.size_bytes:
            raise ValueError(f"a digest by {found[1]} has {len(found[2])} digits")
        return Digest(found[1], int(found[2], 16))


def _combined(algorithm: str, first: int, second: int, size_bytes: int) -> int:
    combine = ALGORITHMS[algorithm].combine
    if combine is None:
        raise ValueError(f"digests by {algorithm} cannot be combined")
    return combine(first, second, size_bytes)


def fields_of(digest: Digest | None) -> dict[str, str | None]:
    """Return the fields of a digest in the JSON of commands: its text, and "crc32c", the field that scripts know."""
    known = digest is not None and digest.algorithm == "crc32c"
    return {"digest": digest and str(digest), "crc32c": digest.hex if digest and known else None}


def unpacked(algorithm: str, column: Bytes, first: int = 0, end: int | None = None) -> list[Digest]:
    """Return the digests of a column of little-endian numbers, those from index `first` on, below `end`."""
    size = ALGORITHMS[algorithm].size_bytes
    starts = range(first * size, len(column) if end is None else end * size, size)
    return [Digest(algorithm, int.from_bytes(column[start : start + size], "little")) for start in starts]


def column_bytes(algorithm: str, size_bytes: int) -> int:
    """Return the size of the column with the digests of all blocks of a file of that size."""
    return ALGORITHMS[algorithm].size_bytes * -(-size_bytes // BLOCK_BYTES)


class Hasher:
    """The digest, with its algorithm, of bytes that come one after another."""

    def __init__(self, algorithm: str = DEFAULT) -> None:
        self._algorithm, self._stream = algorithm, ALGORITHMS[algorithm].begin()
        self.update = self._stream.update

    def digest(self) -> Digest:
        """Return the digest of all bytes so far."""
        return Digest(self._algorithm, self._stream.intdigest())


def block_borders(offset: int, size_bytes: int) -> Sequence[int]:
    """Return the offsets at which the blocks of a payload at `offset` begin, and the end of the last one."""
    return [*range(offset, offset + size_bytes, BLOCK_BYTES), offset + size_bytes] if size_bytes else [offset]


_Segment = tuple[int, int, int]
"""The offset and size of a stretch of a file, and the value of its digest."""


class FileDigest:
    """The digests of one file, collected in any order, by several threads, as its bytes pass."""

    needs_order = False
    """True if the bytes must come in the order of the file, from one thread at a time."""

    def __init__(self, payloads: Sequence[tuple[int, int]] = (), *, algorithm: str = DEFAULT) -> None:
        """Collect also the digests of the blocks of `payloads`, (offset, size_bytes) of ranges; sorted and disjoint."""
        self._name, self._algorithm = algorithm, ALGORITHMS[algorithm]
        self._payloads = payloads
        self._cuts = [cut for offset, size in payloads if size for cut in block_borders(offset, size)]
        self._segments: list[_Segment] = []

    def add(self, offset: int, views: Sequence[memoryview]) -> Digest | None:
        """Hash the bytes at `offset`, and return their digest, None where it is not known. Each byte of the file must
        be added exactly once."""
        added: list[_Segment] = []
        start, stream, end = offset, self._algorithm.begin(), offset
        for view, end, is_border in self._cut(offset, views):
            stream.update(view)
            if is_border:
                if end > start:
                    added.append((start, end - start, stream.intdigest()))
                start, stream = end, self._algorithm.begin()
        if end > start:
            added.append((start, end - start, stream.intdigest()))
        self._segments += added
        return self._joined(added)

    def _cut(self, offset: int, views: Sequence[memoryview]) -> Iterator[tuple[memoryview, int, bool]]:
        """Yield the bytes at `offset`, cut at the borders of blocks: each with the offset behind it, and True if that
        is a border."""
        index = bisect_right(self._cuts, offset)
        for taken in views:
            view = taken
            while index < len(self._cuts) and len(view) >= (room := self._cuts[index] - offset):
                offset, index = offset + room, index + 1
                yield view[:room], offset, True
                view = view[room:]
            offset += len(view)
            yield view, offset, False

    def digest(self) -> Digest:
        """Return the digest of the whole file, once all of it was added."""
        return self._joined(self._segments)

    def _joined(self, segments: Iterable[_Segment]) -> Digest:
        """Return the digest of the stretch that the segments cover. Raises ValueError for a gap or an overlap."""
        total, end = self._algorithm.begin().intdigest(), None
        for offset, size_bytes, value in sorted(segments):
            if end is not None and offset != end:
                raise ValueError(f"the segments have a gap or overlap at {end}")
            total = value if end is None else _combined(self._name, total, value, size_bytes)
            end = offset + size_bytes
        return Digest(self._name, total)

    def block_digests(self) -> tuple[bytes, ...]:
        """Return for each payload the digests of its blocks of 1 MiB, as little-endian integers."""
        segments = iter(sorted(self._segments)) if self._payloads else iter(())
        found = []
        for offset, size_bytes in self._payloads:
            values = []
            for start, end in pairwise(block_borders(offset, size_bytes)):
                at, total = start, 0
                while at < end:
                    segment_offset, segment_bytes, value = next(segments)
                    if segment_offset >= start:
                        total = _combined(self._name, total, value, segment_bytes) if at > start else value
                        at = segment_offset + segment_bytes
                values.append(total)
            found.append(b"".join(value.to_bytes(self._algorithm.size_bytes, "little") for value in values))
        return tuple(found)


class _OrderedFileDigest(FileDigest):
    """A `FileDigest` for an algorithm whose digests cannot be combined."""

    needs_order = True

    def __init__(self, payloads: Sequence[tuple[int, int]], *, algorithm: str) -> None:
        super().__init__(payloads, algorithm=algorithm)
        self._whole, self._block = self._algorithm.begin(), self._algorithm.begin()
        self._block_offset = self._end_offset = 0

    def add(self, offset: int, views: Sequence[memoryview]) -> None:
        if offset != self._end_offset:
            raise ValueError(f"the bytes at {offset} come after those up to {self._end_offset}")
        for view, end, is_border in self._cut(offset, views):
            self._whole.update(view)
            if self._cuts and end <= self._cuts[-1]:
                self._block.update(view)
            if is_border:
                if end > self._block_offset:
                    self._segments.append((self._block_offset, end - self._block_offset, self._block.intdigest()))
                self._block_offset, self._block = end, self._algorithm.begin()
            self._end_offset = end

    def digest(self) -> Digest:
        return Digest(self._name, self._whole.intdigest())


def file_digest(payloads: Sequence[tuple[int, int]] = (), *, algorithm: str = DEFAULT) -> FileDigest:
    """Return a collector for the digests of a file and of the blocks of its payloads, by that algorithm."""
    kind = _OrderedFileDigest if ALGORITHMS[algorithm].combine is None else FileDigest
    return kind(payloads, algorithm=algorithm)
