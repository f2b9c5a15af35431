"""Extents of files in memory, each read once however many ask for it, the least recently used ones dropped first."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from functools import partial

from ckptstore.format.digest import Digest
from ckptstore.runtime.parallel import started
from ckptstore.transfer.moves import EXTENT_BYTES


class ExtentRead:
    """A stretch of one extent: its bytes with their digest, once they were read."""

    def __init__(self, offset: int, size_bytes: int) -> None:
        self.offset, self.size_bytes = offset, size_bytes
        self.ended = threading.Event()
        self.data: memoryview | None = None
        """None before the end, and after a failure."""
        self.digest: Digest | None = None
        self.failure = ""

    def covers(self, offset: int, size_bytes: int) -> bool:
        """Return True if the other stretch lies in this one."""
        return self.offset <= offset and offset + size_bytes <= self.offset + self.size_bytes

    def bytes_at(self, offset: int, size_bytes: int) -> memoryview:
        """Return a stretch of what was read. Raises RuntimeError if it could not be read."""
        if self.data is None:
            raise RuntimeError(self.failure or "It is not read yet")
        return self.data[offset - self.offset :][:size_bytes]

    def digest_of(self, offset: int, size_bytes: int) -> Digest:
        """Return the digest of a stretch of what was read."""
        if self.digest is not None and size_bytes == self.size_bytes:
            return self.digest
        return Digest.of(self.bytes_at(offset, size_bytes))


Read = Callable[[int, memoryview], None]
"""Fills the memory with the bytes of the file from an offset on."""


class Extents:
    """The extents that one process keeps. Safe for threads."""

    def __init__(self, budget_bytes: int, num_reads: int) -> None:
        """Keep at most so many bytes, and read so many pieces at once."""
        self._budget_bytes = budget_bytes
        self._reading = threading.Semaphore(num_reads)
        self._lock = threading.Lock()
        self._extents: OrderedDict[tuple[str, int], list[ExtentRead]] = OrderedDict()
        self._size_bytes = 0

    def get(self, file: str, offset: int, size_bytes: int, read: Read, *, inline: bool) -> ExtentRead:
        """Return a piece that covers a stretch of one extent of a file: one in memory, one that is being read, or a new
        one. With `inline` this thread reads a new one, else a thread of its own."""
        extent = (file, offset // EXTENT_BYTES)
        with self._lock:
            pieces = self._extents.setdefault(extent, [])
            self._extents.move_to_end(extent)
            piece = next((item for item in pieces if item.covers(offset, size_bytes)), None)
            if piece is not None:
                return piece
            piece = ExtentRead(offset, size_bytes)
            pieces.append(piece)
        self._begin(extent, piece, read, inline=inline)
        return piece

    def forget(self, file: str, offset: int) -> None:
        """Drop the extent at an offset: its bytes were not those expected."""
        with self._lock:
            self._drop(file, offset // EXTENT_BYTES)

    def _begin(self, extent: tuple[str, int], piece: ExtentRead, read: Read, *, inline: bool) -> None:
        fill = partial(self._fill, extent, piece, read)
        if inline or started(fill, name="ckptstore-peer-read") is None:
            fill()

    def _fill(self, extent: tuple[str, int], piece: ExtentRead, read: Read) -> None:
        try:
            data = memoryview(bytearray(piece.size_bytes))
            with self._reading:
                read(piece.offset, data)
            piece.digest = Digest.of(data)
            piece.data = data
        except Exception as error:  # whoever wants the piece reads it for itself, and raises what is wrong
            piece.failure = str(error) or type(error).__name__
        finally:
            with self._lock:
                self._settle(extent, piece)
            piece.ended.set()

    def _settle(self, extent: tuple[str, int], piece: ExtentRead) -> None:
        """Count what was read, and drop a piece that failed and what is too much. The caller holds the lock."""
        pieces = self._extents.get(extent, [])
        if piece not in pieces:
            return  # forgotten meanwhile
        if piece.data is None:
            pieces.remove(piece)
        else:
            self._size_bytes += piece.size_bytes
        if not pieces:
            del self._extents[extent]
        while self._size_bytes > self._budget_bytes:
            self._drop(
                *next(old for old, found in self._extents.items() if any(item.data is not None for item in found))
            )

    def _drop(self, file: str, index: int) -> None:
        for piece in self._extents.pop((file, index), ()):
            self._size_bytes -= piece.size_bytes if piece.data is not None else 0
