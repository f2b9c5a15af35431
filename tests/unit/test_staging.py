"""Staging: copies in memory that is kept, made in threads that a device prepares."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptstore.runtime.free_memory import Room
from ckptstore.saving.staging import Buffer, Staging
from ckptstore.state.tensors.segments import Bytes, SegmentSource


class Recorder:
    """A device that notes what it is asked for."""

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}
        self.num_threads = self.num_finished = 0

    def lock_memory(self, address: int, size_bytes: int) -> bool:
        self.locked[address] = size_bytes
        return True

    def unlock_memory(self, address: int) -> None:
        del self.locked[address]

    def pinned_memory(self, size_bytes: int) -> memoryview | None:
        return None

    def entrance(self) -> Callable[[], None]:
        return lambda: None

    def enter_thread(self) -> None:
        self.num_threads += 1

    def finish_copies(self) -> None:
        self.num_finished += 1


def files(*contents: bytes) -> list[SegmentSource]:
    return [SegmentSource([Bytes(memoryview(bytearray(data)))], payloads=[(0, len(data))]) for data in contents]


def test_copies_are_the_files_and_buffers_are_kept() -> None:
    device = Recorder()
    staging = Staging(num_threads=2, device=device)
    for contents in ([os.urandom(20 << 20), b"", b"abc"], [os.urandom(5), os.urandom(1 << 20)]):
        given = files(*contents)
        staged = staging.stage(given, device)
        for one in given:
            one.segments[0].memory[:] = bytes(one.size_bytes)
        assert [bytes(one.views[0]) for one in staged] == list(contents)
        assert [list(one.payloads) for one in staged] == [list(one.payloads) for one in given]
    assert len(staging.buffers) == len(device.locked) == 3
    assert device.num_threads >= device.num_finished == 2
    del staged, one
    staging.close()
    assert device.locked == {}


def test_buffers_are_reserved_ahead_and_grow() -> None:
    device = Recorder()
    staging = Staging(num_threads=1, device=device)
    staging.reserve([3 << 20, 10])
    first = list(staging.buffers)
    staging.stage(files(b"x" * (3 << 20), b"y"), device)
    assert staging.buffers == first
    staging.stage(files(b"x" * (5 << 20)), device)
    assert staging.buffers != first
    assert len(device.locked) == 2
    staging.close()


def prepared(staging: Staging, *sizes_bytes: int) -> list[Buffer]:
    """Wait until all is made, on a machine with memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ckptstore.saving.staging.tightest_room", lambda: Room(75, 100))
        staging.prepare(sizes_bytes)
        while len(staging.buffers) < len(sizes_bytes) or any(buffer.is_new for buffer in staging.buffers):
            time.sleep(0.01)
    return list(staging.buffers)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def test_buffers_are_made_in_the_background() -> None:
    staging = Staging(num_threads=2, device=Recorder())
    made = prepared(staging, 33 << 20, 5 << 20)
    assert staging.is_unused
    contents = os.urandom(33 << 20), os.urandom(5 << 20)
    staged = staging.stage(files(*contents), Recorder())
    assert staging.buffers == made
    assert not staging.is_unused
    assert tuple(bytes(one.views[0]) for one in staged) == contents


def test_a_save_that_comes_too_early_takes_what_is_there() -> None:
    data = os.urandom(40 << 20)
    for _ in range(10):
        staging = Staging(num_threads=2, device=Recorder())
        staging.prepare([len(data), len(data)])
        (staged,) = staging.stage(files(data), Recorder())
        assert staged.views[0] == data
        del staged
        staging.close()


def test_nothing_is_made_where_memory_is_scarce(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr("ckptstore.saving.staging.tightest_room", lambda: asked.append(1) or Room(24, 100))
    staging = Staging(num_threads=1, device=Recorder())
    before = resident_bytes()
    staging.prepare([1 << 30])
    while not asked:
        time.sleep(0.01)
    assert resident_bytes() < before + (64 << 20)
    staging.close()


def test_what_nobody_wants_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptstore.saving.staging._UNUSED_SECONDS", 0.01)
    device = Recorder()
    staging = Staging(num_threads=1, device=device)
    staging.prepare([33 << 20])
    assert staging._preparing is not None
    staging._preparing.join()
    assert device.locked == {}
    staging.stage(files(b"abc"), device)
    assert len(staging.buffers) == 1
    staging.close()


@pytest.mark.parametrize("ahead", [False, True])
def test_memory_is_asked_for_before_the_first_copy_and_never_again(
    ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    real = Buffer.populate

    def populate(buffer: Buffer, start: int = 0, stop: int | None = None) -> None:
        asked.append(start)
        real(buffer, start, stop)

    monkeypatch.setattr(Buffer, "populate", populate)
    staging = Staging(num_threads=2, device=Recorder())
    (source,) = files(os.urandom(40 << 20))
    if ahead:
        prepared(staging, source.size_bytes)
    for _ in range(2):
        (copy,) = staging.stage([source], Recorder())
        assert copy.views[0] == source.segments[0].memory
        del copy
    staging.close()
    assert sorted(asked) == [0, 8 << 20, 16 << 20, 24 << 20, 32 << 20]
