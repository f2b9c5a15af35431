"""Bodies for all object stores: views as a body to send, views to fill, part sizes. Pure."""

from __future__ import annotations

import base64
import functools
import io
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ckptstore.config import TransferConfig
from ckptstore.errors import CheckpointDamaged, StorageUnavailable
from ckptstore.format.digest import ALGORITHMS, Digest

PIECE_BYTES = 1 << 20
"""The bytes of one call on a socket: large enough to cost nothing, small enough for the cache."""
PART_BYTES = 16 << 20
_LARGE_PART_BYTES = 32 << 20
_LARGE_FILE_BYTES = 128 << 20
"""The size from which a file has enough large parts to be sent in parallel; half as many requests cost half as much."""
_MAX_PARTS = 9_000
"""The most parts of a file; the limit of S3 and GCS is 10,000."""
_MIB = 1 << 20


def total_bytes(views: Iterable[memoryview]) -> int:
    """Return the number of bytes of all views."""
    return sum(len(view) for view in views)


def part_bytes(size_bytes: int) -> int:
    """Return the part size of a file: 16 MiB, 32 MiB for a large one, or less if the configuration says so; more if
    there would be too many parts."""
    least_bytes = PART_BYTES if size_bytes < _LARGE_FILE_BYTES else _LARGE_PART_BYTES
    least_bytes = min(least_bytes, _most_part_bytes(os.environ.get("CKPTSTORE_PART_BYTES")))
    return max(least_bytes, -(-size_bytes // _MAX_PARTS // _MIB) * _MIB)


@functools.lru_cache(maxsize=1)
def _most_part_bytes(_: str | None) -> int:
    return TransferConfig.from_env().part_bytes  # takes a tenth of a millisecond


class ViewsBody(io.RawIOBase):
    """Views as a file that an HTTP client sends: it can be rewound, and nothing is copied.

    `read` returns a view of at most 1 MiB, whatever size is requested; HTTP clients send the bytes that they get.
    """

    def __init__(self, views: Sequence[memoryview]) -> None:
        self.views = views
        self._size_bytes = total_bytes(views)
        self._position = self._index = self._offset = 0

    def __len__(self) -> int:
        return self._size_bytes

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to the beginning or the end, to measure the body and to send it again; nothing else is supported."""
        if (offset, whence) == (0, io.SEEK_SET):
            self._position = self._index = self._offset = 0
        elif (offset, whence) == (0, io.SEEK_END):
            self._position, self._index = self._size_bytes, len(self.views)
        elif whence != io.SEEK_SET or offset != self._position:
            raise io.UnsupportedOperation("seek")
        return self._position

    def read(self, size: int = -1) -> bytes:
        return self._next(PIECE_BYTES)  # type: ignore[return-value]  # any buffer is sent as it is

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer as far as one view goes, for the signer of the AWS Common Runtime."""
        target = memoryview(buffer).cast("B")
        view = self._next(len(target))
        target[: len(view)] = view
        return len(view)

    def _next(self, most_bytes: int) -> memoryview | bytes:
        """Move past the next bytes of one view, and return them; none at the end."""
        while self._index < len(self.views):
            view = self.views[self._index][self._offset : self._offset + most_bytes]
            if view:
                self._offset += len(view)
                self._position += len(view)
                return view
            self._index, self._offset = self._index + 1, 0
        return b""


class Filling:
    """Views that are filled, one after another, by incoming chunks of any size."""

    def __init__(self, views: Sequence[memoryview], *, key: str) -> None:
        self._views = [view for view in views if len(view)]
        self._key = key
        self._index = 0
        self._offset = 0
        self.missing_bytes = total_bytes(views)

    def read_from(self, readinto: Callable[[memoryview], int], most_bytes: int = PIECE_BYTES) -> None:
        """Fill the views by calls of `readinto` for at most so many bytes each, until they are full or it returns 0."""
        while self.missing_bytes:
            count = readinto(self._views[self._index][self._offset : self._offset + most_bytes])
            if not count:
                return
            self._advance(count)

    def _advance(self, size_bytes: int) -> None:
        self._offset += size_bytes
        self.missing_bytes -= size_bytes
        if self._offset == len(self._views[self._index]):
            self._index, self._offset = self._index + 1, 0

    def take(self, chunk: bytes | memoryview) -> None:
        """Copy a chunk. Raises StorageUnavailable for one that is too long: then it does not match the request."""
        source = memoryview(chunk)
        if len(source) > self.missing_bytes:
            raise StorageUnavailable("The answer is longer than the range that was asked for", file=self._key)
        while source:
            view = self._views[self._index]
            count = min(len(source), len(view) - self._offset)
            view[self._offset : self._offset + count] = source[:count]
            source = source[count:]
            self._advance(count)

    def end(self, *, file_bytes: int | None, end_offset: int) -> None:
        """Raise an error unless all views are full: CheckpointDamaged if the file is too short, else StorageUnavailable
        for a response that broke off."""
        if not self.missing_bytes:
            return
        if file_bytes is not None and file_bytes < end_offset:
            raise CheckpointDamaged(f"The file has {file_bytes} bytes, {end_offset} were expected", file=self._key)
        raise StorageUnavailable(f"The answer broke off, {self.missing_bytes} bytes are missing", file=self._key)


CHECKSUM = "crc32c"
"""The algorithm by which S3 and Google check an incoming body, independent of the digests of files."""
CHECKSUM_TITLE = ALGORITHMS[CHECKSUM].title


def checksum_of(views: Sequence[memoryview], digest: Digest | None) -> Digest:
    """Return the checksum to send with a body; `digest` is its digest, if that is known."""
    known = digest is not None and digest.algorithm == CHECKSUM
    return digest if digest and known else Digest.of(*views, algorithm=CHECKSUM)


def checksum_text(checksum: Digest) -> str:
    """Return a checksum as S3 and Google write it."""
    return base64.b64encode(bytes.fromhex(checksum.hex)).decode()
