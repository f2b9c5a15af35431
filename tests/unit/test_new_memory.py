"""Memory that is new to a process, and the size of its pages."""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptstore.runtime import new_memory as module
from ckptstore.runtime.new_memory import HUGE_BYTES, new_memory, populate

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="pages are looked at as Linux shows them")

_SIZE_BYTES = 8 * HUGE_BYTES


@pytest.fixture(autouse=True)
def as_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module._Pages, "are_slow", False)
    monkeypatch.setattr(module, "_SLOW_SECONDS", 1e9)


def test_it_is_zeros_that_can_be_written() -> None:
    memory = new_memory(_SIZE_BYTES)
    assert memory[:] == bytes(_SIZE_BYTES)
    memory[-1:] = b"x"
    assert memory[-1:] == b"x"


def test_a_stretch_that_was_asked_for_is_there() -> None:
    memory = new_memory(_SIZE_BYTES)
    populate(memory, HUGE_BYTES, 5 * HUGE_BYTES + 1)
    assert resident_bytes(memory) >= 4 * HUGE_BYTES
    assert memory[:] == bytes(_SIZE_BYTES)


def test_huge_pages_are_asked_for() -> None:
    assert "hg" in flags(new_memory(_SIZE_BYTES))


def test_after_a_slow_huge_page_all_pages_are_small(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = new_memory(_SIZE_BYTES)
    monkeypatch.setattr(module, "_SLOW_SECONDS", 0.0)
    populate(memory, HUGE_BYTES, 3 * HUGE_BYTES)
    assert "nh" in flags(memory)
    assert "nh" in flags(new_memory(_SIZE_BYTES))


def test_where_the_system_cannot_give_memory_ahead_it_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MADV_POPULATE_WRITE", 0x7FFF)
    memory = new_memory(_SIZE_BYTES)
    populate(memory, 0, _SIZE_BYTES)
    assert resident_bytes(memory) >= _SIZE_BYTES
    assert memory[:] == bytes(_SIZE_BYTES)


def flags(memory: mmap.mmap) -> set[str]:
    """What the system knows of the mapping that the memory lies in."""
    return set(next(line for line in mapping_of(memory) if line.startswith("VmFlags:")).split()[1:])


def resident_bytes(memory: mmap.mmap) -> int:
    return int(next(line for line in mapping_of(memory) if line.startswith("Rss:")).split()[1]) << 10


def mapping_of(memory: mmap.mmap) -> Iterator[str]:
    """The lines of the mapping; others of its kind may have become one with it."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            start, end = (int(part, 16) for part in first.split("-"))
            inside = start <= address < end
        elif inside:
            yield line


def test_memory_that_the_system_cannot_give_is_an_error(tmp_path: Path) -> None:
    """To write behind the end of a file that is mapped would end the process."""
    with open(tmp_path / "short", "w+b") as file:
        file.truncate(HUGE_BYTES)
        memory = mmap.mmap(file.fileno(), HUGE_BYTES)
        file.truncate(0)
        with pytest.raises(OSError, match="Bad address"):
            populate(memory, 0, HUGE_BYTES)
