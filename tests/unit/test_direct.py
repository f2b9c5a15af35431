"""Writing past the page cache: the bytes are the same, whatever the memory they come from, and they are on the disk."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptstore.storage.disk import direct, posix
from ckptstore.storage.disk.local import LocalStorage

MIB = 1 << 20


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    if not posix.writes_directly(str(tmp_path)):
        pytest.skip("temporary directories are not on ext4 or XFS here")
    return tmp_path


def cached_bytes(path: Path) -> int:
    """How much of a file the page cache holds. To ask the map reads nothing ahead, as a read without waiting would."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
        are_cached = (ctypes.c_ubyte * -(-len(mapped) // mmap.PAGESIZE))()
        first = ctypes.c_char.from_buffer(mapped)
        failed = ctypes.CDLL(None, use_errno=True).mincore(
            ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(len(mapped)), are_cached
        )
        del first
    assert not failed, os.strerror(ctypes.get_errno())
    found = sum(is_cached & 1 for is_cached in are_cached)
    return min(found * mmap.PAGESIZE, path.stat().st_size)


def write(storage: LocalStorage, key: str, data: bytearray, cuts: list[int]) -> None:
    """Each part in pieces that end at `cuts`, counted from its beginning; the parts by several threads."""
    part_bytes = storage.part_bytes(len(data))
    writer = storage.open_parts(key, len(data))

    def one(start: int) -> None:
        part = memoryview(data)[start : start + part_bytes]
        ends = sorted({min(cut, len(part)) for cut in cuts} | {len(part)})
        writer.write_part(start, [part[a:b] for a, b in zip([0, *ends], ends, strict=False)])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(one, range(0, len(data), part_bytes)))
    writer.finish()


def test_a_durable_file_takes_no_page_cache(disk: Path) -> None:
    data = bytearray(random.randbytes(4 * MIB + 777))
    for name, is_durable, is_direct in (("direct", True, True), ("off", True, False), ("not-durable", False, True)):
        storage = LocalStorage(disk, durable=is_durable, direct_io=is_direct)
        write(storage, name, data, [100, MIB // 2])
        cached = cached_bytes(disk / name)
        assert cached <= 4096 if name == "direct" else cached == len(data), name
        assert (disk / name).read_bytes() == data
        assert (disk / name).stat().st_mode & 0o777 == 0o444


def test_large_files_are_written_in_larger_parts_still_larger_ones_where_that_is_direct(disk: Path) -> None:
    data = bytearray(random.randbytes(MIB)) * 32 + bytearray(b"end")
    sizes = [LocalStorage(disk).part_bytes(size) for size in (len(data), 16 * MIB, 16 * MIB - 1)]
    sizes += [LocalStorage(disk, **off).part_bytes(len(data)) for off in ({"durable": False}, {"direct_io": False})]
    assert sizes == [8 * MIB, 8 * MIB, MIB, 4 * MIB, 4 * MIB]
    write(LocalStorage(disk), "file", data, [100, 5 * MIB])
    assert cached_bytes(disk / "file") <= 4096
    assert (disk / "file").read_bytes() == data


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    size=st.integers(MIB + 1, 3 * MIB),
    cuts=st.lists(st.integers(0, MIB) | st.sampled_from([512, 4096, MIB // 2]), max_size=4),
    shift=st.sampled_from([0, 1, 64, 512, 4096]),
)
def test_any_memory_in_any_pieces(disk: Path, size: int, cuts: list[int], shift: int) -> None:
    memory = bytearray(random.randbytes(size + shift))
    data = memory[shift:]
    write(LocalStorage(disk), "file", data, cuts)
    assert (disk / "file").read_bytes() == data


def test_memory_that_cannot_be_written_to(disk: Path) -> None:
    data = random.randbytes(MIB + 5)
    writer = LocalStorage(disk).open_parts("file", len(data))
    writer.write_part(0, [memoryview(data)[:MIB]])
    writer.write_part(MIB, [memoryview(data)[MIB:]])
    writer.finish()
    assert (disk / "file").read_bytes() == data


def test_a_disk_that_wants_more_than_it_tells(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel refuses the memory that is handed over, and the file goes through the page cache."""
    monkeypatch.setattr(posix, "direct_alignment", lambda _descriptor: (1, 1))
    page = memoryview(mmap.mmap(-1, 3 * MIB))
    page[:] = random.randbytes(len(page))
    data = page[8 : 8 + 2 * MIB]
    writer = LocalStorage(disk).open_parts("file", len(data))
    writer.write_part(MIB, [data[MIB:]])
    writer.write_part(0, [data[:MIB]])
    writer.finish()
    assert (disk / "file").read_bytes() == bytes(data)


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A system that tells nothing of alignments."""
    calls: list[int] = []
    real: Any = posix._call

    def call(name: str, *arguments: Any) -> None:
        if name == "statx":
            calls.append(1)
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        real(name, *arguments)

    monkeypatch.setattr(posix, "_call", call)
    return calls


def test_a_system_that_does_not_tell_alignments(disk: Path, refused: list[int]) -> None:
    data = bytearray(random.randbytes(2 * MIB + 4096 + 512))
    write(LocalStorage(disk), "file", data, [64])
    assert refused
    assert cached_bytes(disk / "file") <= 4096
    assert (disk / "file").read_bytes() == data


def test_a_full_buffer_is_kept_per_thread() -> None:
    first = direct._gathered([memoryview(b"ab"), memoryview(bytearray(b"cd"))], 4)
    assert bytes(first) == b"abcd"
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(lambda: bytes(direct._gathered([memoryview(b"wxyz")], 4))).result()
    assert (bytes(first), other) == (b"abcd", b"wxyz")


def test_a_file_system_without_direct_writes(tmp_path: Path) -> None:
    root = Path("/dev/shm") / f"ckptstore-test-{os.getpid()}"
    if not root.parent.is_dir() or posix.writes_directly("/dev/shm"):
        pytest.skip("no /dev/shm")
    try:
        data = bytearray(random.randbytes(MIB + 3))
        write(LocalStorage(root), "file", data, [])
        assert (root / "file").read_bytes() == data
    finally:
        (root / "file").unlink(missing_ok=True)
        root.rmdir()
