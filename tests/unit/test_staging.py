"""Staging: copies in memory that is kept, made in threads that a device prepares."""

from __future__ import annotations

import os

import pytest

from ckptstore.saving.staging import Staging
from ckptstore.transfer.planned import PlannedFile
from ckptstore.transfer.sources import MemorySource


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

    def enter_thread(self) -> None:
        self.num_threads += 1

    def finish_copies(self) -> None:
        self.num_finished += 1


def files(*contents: bytes) -> list[PlannedFile]:
    return [
        PlannedFile(f"f{index}", MemorySource([memoryview(bytearray(data))], payloads=[(0, len(data))]))
        for index, data in enumerate(contents)
    ]


@pytest.mark.parametrize("shared", [False, True])
def test_copies_are_the_files_and_buffers_are_kept(shared: bool) -> None:
    device = Recorder()
    staging = Staging(shared=shared, num_threads=2, device=device)
    for contents in ([os.urandom(20 << 20), b"", b"abc"], [os.urandom(5), os.urandom(1 << 20)]):
        given = files(*contents)
        staged = staging.stage(given, device)
        for one in given:
            one.source.views[0][:] = bytes(len(one.source.views[0]))  # type: ignore[attr-defined]
        assert [bytes(one.source.views[0]) for one in staged] == list(contents)  # type: ignore[attr-defined]
        assert [(one.key, list(one.source.payloads)) for one in staged] == [
            (one.key, list(one.source.payloads)) for one in given
        ]
    assert len(staging.buffers) == len(device.locked) == 3
    assert all((buffer.descriptor is not None) == shared for buffer in staging.buffers)
    assert device.num_threads >= device.num_finished == 2
    del staged, one
    staging.close()
    assert device.locked == {}


def test_buffers_are_reserved_ahead_and_grow() -> None:
    device = Recorder()
    staging = Staging(shared=False, num_threads=1, device=device)
    staging.reserve([3 << 20, 10])
    first = [buffer.number for buffer in staging.buffers]
    staging.stage(files(b"x" * (3 << 20), b"y"), device)
    assert [buffer.number for buffer in staging.buffers] == first
    staging.stage(files(b"x" * (5 << 20)), device)
    assert [buffer.number for buffer in staging.buffers] != first
    assert len(device.locked) == 2
    staging.close()
