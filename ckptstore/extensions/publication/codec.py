"""The bytes of deltas: what a tensor changed, compressed, and back. In native code, off the interpreter lock.

A delta of a tensor is a frame of zstd, of the XOR of its old and its new bytes. `overwrite` is the other encoding that
publishers use: positions and new bytes. All work goes through windows of 1 MiB, which stay in the processor's cache.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import zstandard

from ckptstore.errors import CheckpointDamaged, UnsupportedVersion
from ckptstore.extensions.publication.wire import STRONG, WEAK
from ckptstore.format.digest import fingerprinter

WINDOW_BYTES = 1 << 20
_LEVEL = 1
_COUNT_BYTES = 4
_MAX_WINDOW_BYTES = 128 << 20
"""The most memory that a frame of a foreign publisher may ask for."""


def num_threads() -> int:
    """Return how many threads encode or apply at once."""
    return len(os.sched_getaffinity(0))


Memory = np.ndarray[Any, np.dtype[np.uint8]]


class TensorHasher(Protocol):
    """The digest of bytes that come one after another."""

    def update(self, data: Any) -> None:
        """Add the next bytes."""

    def hexdigest(self) -> str:
        """Return the digest of all bytes so far."""


class _Adler32:
    def __init__(self) -> None:
        self._value = zlib.adler32(b"")

    def update(self, data: Any) -> None:
        self._value = zlib.adler32(data, self._value)

    def hexdigest(self) -> str:
        return f"{self._value:08x}"


HASHERS: Mapping[str, Callable[[], TensorHasher]] = {STRONG: fingerprinter, WEAK: _Adler32}
"""The digests of tensors, by their names in the format."""


def hasher(name: str) -> TensorHasher:
    """Return a new hasher. Raises UnsupportedVersion for a digest that this code does not know."""
    if name not in HASHERS:
        raise UnsupportedVersion(
            f"The digests of the version are of the kind {name!r}, which ckptstore cannot compare",
            hint=f"Publish with one of {', '.join(HASHERS)}",
        )
    return HASHERS[name]()


def digest_of(memory: Memory, name: str) -> str:
    """Return the digest of some bytes, in hexadecimal digits."""
    found = hasher(name)
    found.update(memory)
    return found.hexdigest()


def encode(old: Memory, new: Memory, *, checksum: str) -> tuple[bytes | None, str]:
    """Return the delta between two contents of a tensor, None if they are equal bit by bit, and the digest of `new`."""
    found, size = hasher(checksum), len(new)
    compressor: Any = None
    pieces: list[bytes] = []
    scratch = np.empty(min(size, WINDOW_BYTES), np.uint8)
    equal_bytes = 0
    for start in range(0, size, WINDOW_BYTES):
        window = new[start : start + WINDOW_BYTES]
        difference = scratch[: len(window)]
        _xor(old[start : start + WINDOW_BYTES], window, difference)
        found.update(window)
        if compressor is None:
            if not difference.any():
                equal_bytes += len(window)
                continue
            compressor = zstandard.ZstdCompressor(level=_LEVEL).compressobj(size=size)
            zeros = memoryview(bytes(min(equal_bytes, WINDOW_BYTES)))
            pieces += [compressor.compress(zeros) for _ in range(equal_bytes // WINDOW_BYTES)]
        pieces.append(compressor.compress(difference))
    if compressor is None:
        return None, found.hexdigest()
    pieces.append(compressor.flush())
    return b"".join(pieces), found.hexdigest()


def _xor(a: Memory, b: Memory, out: Memory) -> None:
    """Write the XOR of two stretches; eight bytes at a time where their addresses allow it."""
    size = len(a)
    if size % 8 == 0 and not any(item.ctypes.data % 8 for item in (a, b, out)):
        np.bitwise_xor(a.view(np.uint64), b.view(np.uint64), out=out.view(np.uint64))
    else:
        np.bitwise_xor(a, b, out=out)


class Change(Protocol):
    """One change of a tensor, applied window by window, in their order."""

    def apply(self, start: int, window: Memory) -> None:
        """Change the bytes of the tensor from `start` on, in place. Raises CheckpointDamaged."""

    def end(self) -> None:
        """Raise CheckpointDamaged if the change has bytes behind the end of the tensor."""


class XorChange:
    """The change of a delta of `encode`."""

    def __init__(self, data: Any, name: str) -> None:
        self._name = name
        self._reader = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES).stream_reader(
            data, read_across_frames=True
        )
        self._scratch = np.empty(WINDOW_BYTES, np.uint8)

    def apply(self, start: int, window: Memory) -> None:
        """See `Change.apply`."""
        difference = self._scratch[: len(window)]
        view, filled = difference.data, 0
        while filled < len(window):
            count = _decoded(self._name, lambda: self._reader.readinto(view[filled:]))  # noqa: B023 - called at once
            if not count:
                raise CheckpointDamaged(f"The delta of {self._name} ends at byte {start + filled} of the tensor")
            filled += count
        _xor(difference, window, window)

    def end(self) -> None:
        """See `Change.end`."""
        if _decoded(self._name, lambda: self._reader.read(1)):
            raise CheckpointDamaged(f"The delta of {self._name} is longer than the tensor")


class OverwriteChange:
    """The change of an `overwrite` delta: how many bytes changed, where, ascending, and the new ones."""

    def __init__(self, data: Any, name: str, *, size_bytes: int) -> None:
        most_bytes = _COUNT_BYTES + 5 * size_bytes
        decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES)
        plain = _decoded(name, lambda: decompressor.stream_reader(data).read(most_bytes + 1))
        count = int.from_bytes(plain[:_COUNT_BYTES], "little")
        if len(plain) != _COUNT_BYTES + 5 * count:
            raise CheckpointDamaged(f"The delta of {name} has {len(plain)} bytes for {count} changed ones")
        ends = _COUNT_BYTES * (1 + count)
        self._positions = np.frombuffer(plain[_COUNT_BYTES:ends], "<u4").astype(np.int64)
        self._values = np.frombuffer(plain[ends:], np.uint8)
        if count and (self._positions[-1] >= size_bytes or (np.diff(self._positions) <= 0).any()):
            raise CheckpointDamaged(f"The delta of {name} has positions that are not ascending or not in the tensor")

    def apply(self, start: int, window: Memory) -> None:
        """See `Change.apply`."""
        first, last = np.searchsorted(self._positions, (start, start + len(window)))
        window[self._positions[first:last] - start] = self._values[first:last]

    def end(self) -> None:
        """See `Change.end`."""


def _decoded(name: str, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except zstandard.ZstdError as error:
        raise CheckpointDamaged(f"The delta of {name} cannot be decompressed: {error}") from error


def replay(
    read: Callable[[int, Memory], None],
    write: Callable[[int, Memory], None] | None,
    size_bytes: int,
    changes: Sequence[Change],
    checksum: str,
) -> str:
    """Apply some changes to a tensor, window by window, and return the digest of the result.

    `read` fills memory with the old bytes from a position on, `write` takes the new ones; None to learn the digest.
    Raises CheckpointDamaged for a change that does not fit the tensor.
    """
    found = hasher(checksum)
    buffer = np.empty(min(size_bytes, WINDOW_BYTES), np.uint8)
    for start in range(0, size_bytes, WINDOW_BYTES):
        window = buffer[: min(WINDOW_BYTES, size_bytes - start)]
        read(start, window)
        for change in changes:
            change.apply(start, window)
        found.update(window)
        if write is not None:
            write(start, window)
    for change in changes:
        change.end()
    return found.hexdigest()
