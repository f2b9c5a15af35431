"""Move the same bytes between memory and files with system calls alone, and by one memcpy."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

MIB = 1 << 20
_SYNC_FILE_RANGE_WRITE = 2
_EARLY_BYTES = 8 * MIB
_libc = ctypes.CDLL(None, use_errno=True)
_libc.sync_file_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]


class Memory:
    """Memory that begins at a page, as direct writes require, and is allocated."""

    def __init__(self, size_bytes: int) -> None:
        self.map = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.map.madvise(mmap.MADV_HUGEPAGE)
        self.view = memoryview(self.map)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        ctypes.memset(self.address, 1, size_bytes)

    def close(self) -> None:
        self.view.release()


def in_threads(count: int, work: Callable[[int], object]) -> None:
    """Call a function with the number of each of so many threads."""
    with ThreadPoolExecutor(count) as pool:
        list(pool.map(work, range(count)))


def write(
    source: memoryview,
    directory: Path,
    *,
    kind: str,
    block_bytes: int,
    one_file: bool,
    num_threads: int = 2,
    durable: bool,
) -> None:
    """Write `source` to files of a new directory, in equal shares of the threads.

    The kind is "buffered", "early" (room is allocated first, and write-back begins at once) or "direct".
    """
    directory.mkdir(parents=True)
    share = -(-len(source) // num_threads // MIB) * MIB
    flags = os.O_WRONLY | os.O_CREAT | (os.O_DIRECT if kind == "direct" else 0)
    files = [os.open(directory / f"{number}.bin", flags) for number in range(1 if one_file else num_threads)]

    def work(number: int) -> None:
        piece = source[number * share : (number + 1) * share]
        file, start = (files[0], number * share) if one_file else (files[number], 0)
        if kind == "early" and not one_file and len(piece):
            os.posix_fallocate(file, 0, len(piece))
        for offset in range(0, len(piece), block_bytes):
            block = piece[offset : offset + block_bytes]
            written = os.pwrite(file, block, start + offset)
            assert written == len(block)
            if kind == "early" and (offset + block_bytes) % _EARLY_BYTES == 0:
                begin = start + offset + block_bytes - _EARLY_BYTES
                _libc.sync_file_range(file, begin, _EARLY_BYTES, _SYNC_FILE_RANGE_WRITE)
        if durable and not one_file:
            os.fsync(file)

    if kind == "early" and one_file:
        os.posix_fallocate(files[0], 0, len(source))
    in_threads(num_threads, work)
    for file in files:
        if durable and one_file:
            os.fsync(file)
        os.close(file)
    if durable:
        sync(directory)


def sync(path: Path) -> None:
    """Call fsync for a file, or for a directory: its removals and creations are finished, others' writes go on."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_into(
    target: memoryview,
    paths: Sequence[Path],
    *,
    num_threads: int,
    block_bytes: int = MIB,
    then: Callable[[int, int], object] = lambda start, end: None,
) -> None:
    """Fill memory from the beginning of files, one after another, block by block; call with the bounds of each block.

    Raises OSError for a file that got shorter.
    """
    blocks = []
    start = 0
    files = [os.open(path, os.O_RDONLY) for path in paths]
    for file in files:
        size_bytes = min(os.fstat(file).st_size, len(target) - start)
        blocks += [(file, offset, start + offset, size_bytes) for offset in range(0, size_bytes, block_bytes)]
        start += size_bytes

    def work(number: int) -> None:
        for file, offset, place, size_bytes in blocks[number::num_threads]:
            end = place + min(block_bytes, size_bytes - offset)
            if os.preadv(file, [target[place:end]], offset) != end - place:
                raise OSError(f"a file is shorter than {size_bytes} bytes")
            then(place, end)

    in_threads(num_threads, work)
    for file in files:
        os.close(file)


def copy(target: Memory, source: Memory, *, num_threads: int = 1) -> None:
    """Copy everything by memcpy, with so many threads."""
    size_bytes = len(source.map)
    share = -(-size_bytes // num_threads)

    def work(number: int) -> None:
        start = number * share
        ctypes.memmove(target.address + start, source.address + start, min(share, size_bytes - start))

    if num_threads == 1:  # no thread starts beside the only copy
        work(0)
    else:
        in_threads(num_threads, work)
