"""Move the same bytes between memory and files with system calls alone, and by one memcpy."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to write bytes to files."""

    kind: str
    """"buffered", "early" (room is allocated first, and write-back begins at once) or "direct"."""
    block_bytes: int
    one_file: bool
    num_threads: int = 2
    durable: bool = True

    def write(self, source: memoryview, directory: Path) -> None:
        """Write `source`, in equal shares of the threads."""
        directory.mkdir(parents=True)
        share = -(-len(source) // self.num_threads // MIB) * MIB
        flags = os.O_WRONLY | os.O_CREAT | (os.O_DIRECT if self.kind == "direct" else 0)
        count = 1 if self.one_file else self.num_threads
        files = [os.open(directory / f"{number}.bin", flags) for number in range(count)]

        def work(number: int) -> None:
            piece = source[number * share : (number + 1) * share]
            file = files[0 if self.one_file else number]
            start = number * share if self.one_file else 0
            if self.kind == "early" and not self.one_file and len(piece):
                os.posix_fallocate(file, 0, len(piece))
            for offset in range(0, len(piece), self.block_bytes):
                block = piece[offset : offset + self.block_bytes]
                written = os.pwrite(file, block, start + offset)
                assert written == len(block)
                if self.kind == "early" and (offset + self.block_bytes) % _EARLY_BYTES == 0:
                    begin = start + offset + self.block_bytes - _EARLY_BYTES
                    _libc.sync_file_range(file, begin, _EARLY_BYTES, _SYNC_FILE_RANGE_WRITE)
            if self.durable and not self.one_file:
                os.fsync(file)

        if self.kind == "early" and self.one_file:
            os.posix_fallocate(files[0], 0, len(source))
        with ThreadPoolExecutor(self.num_threads) as pool:
            list(pool.map(work, range(self.num_threads)))
        for file in files:
            if self.durable and self.one_file:
                os.fsync(file)
            os.close(file)
        if self.durable:
            settle(directory)


def settle(directory: Path) -> None:
    """Have the file system finish removals and creations in a directory, without waiting for others' writes."""
    above = os.open(directory, os.O_RDONLY)
    os.fsync(above)
    os.close(above)


def ways(*, durable: bool, blocks: tuple[int, ...] = (MIB, 4 * MIB, 16 * MIB)) -> Iterator[Way]:
    """Yield all ways to write: direct ones only for durable writes, which leave nothing in memory."""
    kinds = ("buffered", "early", "direct") if durable else ("buffered",)
    for kind, block_bytes, one_file in itertools.product(kinds, blocks, (True, False)):
        yield Way(kind=kind, block_bytes=block_bytes, one_file=one_file, durable=durable)


def read_into(target: memoryview, paths: list[Path], *, num_threads: int, block_bytes: int = MIB) -> None:
    """Fill memory from the beginning of files, one after another, block by block."""
    blocks = []
    start = 0
    files = [os.open(path, os.O_RDONLY) for path in paths]
    for file in files:
        size_bytes = min(os.fstat(file).st_size, len(target) - start)
        blocks += [(file, offset, start + offset, size_bytes) for offset in range(0, size_bytes, block_bytes)]
        start += size_bytes

    def work(number: int) -> None:
        for file, offset, place, size_bytes in blocks[number::num_threads]:
            os.preadv(file, [target[place : place + min(block_bytes, size_bytes - offset)]], offset)

    with ThreadPoolExecutor(num_threads) as pool:
        list(pool.map(work, range(num_threads)))
    for file in files:
        os.close(file)


def copy(target: Memory, source: Memory, *, num_threads: int = 1) -> None:
    """Copy everything by memcpy, with so many threads."""
    size_bytes = len(source.map)
    share = -(-size_bytes // num_threads)

    def work(number: int) -> None:
        start = number * share
        ctypes.memmove(target.address + start, source.address + start, min(share, size_bytes - start))

    if num_threads == 1:
        work(0)
        return
    with ThreadPoolExecutor(num_threads) as pool:
        list(pool.map(work, range(num_threads)))
