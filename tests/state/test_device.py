"""Copies from a device: by a stand-in for CUDA that records each call with its thread and that thread's device."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from ckptstore.saving.staging import Staging
from ckptstore.state.tensors import device


class Cuda:
    """Two devices. Each thread begins on device 0, as with CUDA, and its streams are the default ones."""

    def __init__(self) -> None:
        self._thread = threading.local()
        self.log: list[tuple[Any, ...]] = []
        self.contexts: set[int] = set()
        self.num_streams = 0

    def note(self, *what: Any) -> None:
        self.log.append((threading.current_thread() is threading.main_thread(), *what))

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def cudart(self) -> Any:
        return self

    def cudaHostRegister(self, address: int, size_bytes: int, flags: int) -> int:
        self.contexts.add(self.current_device())
        return 1

    def current_device(self) -> int:
        return getattr(self._thread, "device", 0)

    def set_device(self, index: int) -> None:
        self._thread.device = index
        self.contexts.add(index)

    def current_stream(self, index: int | None = None) -> Any:
        index = self.current_device() if index is None else index
        streams = getattr(self._thread, "streams", {})
        return streams.get(index) or self.default_stream(index)

    def default_stream(self, index: int | None = None) -> Any:
        return Stream(self, self.current_device() if index is None else index, name="default")

    def set_stream(self, stream: Any) -> None:
        self.set_device(stream.device)
        self._thread.streams = {**getattr(self._thread, "streams", {}), stream.device: stream}

    def Stream(self, device: int | None = None) -> Any:
        self.num_streams += 1
        index = self.current_device() if device is None else device
        self.contexts.add(index)
        return Stream(self, index, name=f"side{self.num_streams}")

    def Event(self) -> Any:
        return Event(self)

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, device = self.current_stream(stream.device), self.current_device()
        self.set_stream(stream)
        yield
        self.set_stream(before)
        self.set_device(device)


class Stream:
    def __init__(self, cuda: Cuda, device: int, *, name: str) -> None:
        self.cuda, self.device, self.name = cuda, device, name

    def wait_event(self, event: Any) -> None:
        self.cuda.note("wait", self.name, self.device, event.recorded)

    def wait_stream(self, other: Any) -> None:
        self.cuda.note("wait", self.name, self.device, (other.name, other.device))

    def synchronize(self) -> None:
        self.cuda.note("synchronize", self.name, self.device)


class Event:
    recorded: Any = None

    def __init__(self, cuda: Cuda) -> None:
        self.cuda = cuda

    def record(self, stream: Any) -> None:
        self.recorded = stream.name, stream.device
        self.cuda.note("record", *self.recorded)

    def synchronize(self) -> None:
        self.cuda.note("synchronize", *self.recorded)


class OnDevice:
    """A file whose bytes are copied from device 1; notes where each copy runs."""

    payloads: Sequence[tuple[int, int]] = ()

    def __init__(self, cuda: Cuda, size_bytes: int) -> None:
        self.cuda, self.size_bytes = cuda, size_bytes

    def fill(self, offset: int, target: memoryview) -> None:
        stream = self.cuda.current_stream(1)
        self.cuda.note("copy", stream.name, self.cuda.current_device())
        target[:] = b"x" * len(target)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cuda]:
    """A rank of the second GPU of its node, which trains on a stream of its own."""
    stand_in = Cuda()
    monkeypatch.setattr(device, "_cuda", stand_in)
    device._side_stream.cache_clear()
    stand_in.set_stream(Stream(stand_in, 1, name="training"))
    yield stand_in
    device._side_stream.cache_clear()


def stage_twice(*sizes_bytes: int, devices: set[torch.device], cuda: Cuda) -> None:
    staging = Staging(shared=False, num_threads=3, device=device)
    for _ in range(2):
        files = [OnDevice(cuda, size) for size in sizes_bytes]
        staged = staging.stage(files, device.LaunchedWork(devices))
        assert [bytes(one.views[0]) for one in staged] == [b"x" * size for size in sizes_bytes]
    del staged
    staging.close()


def test_copies_run_on_one_side_stream_of_the_own_device_after_what_the_caller_launched(cuda: Cuda) -> None:
    stage_twice(40 << 20, 5, devices={torch.device("cuda", 1)}, cuda=cuda)
    assert cuda.contexts == {1}, "no other GPU is touched"
    assert cuda.num_streams == 1, "one side stream, however much is copied and however often"
    copies = [entry for entry in cuda.log if entry[1] == "copy"]
    assert len(copies) == 2 * 6
    assert set(copies) == {(False, "copy", "side1", 1)}
    waits = {entry for entry in cuda.log if entry[1] == "wait"}
    assert waits == {(False, "wait", "side1", 1, ("training", 1))}
    assert cuda.log[0] == (True, "record", "training", 1), "the calling thread says what there is to wait for"
    assert cuda.log[-1] == (True, "synchronize", "side1", 1)
    assert (cuda.current_device(), cuda.current_stream().name) == (1, "training")


def test_memory_that_is_made_in_the_background_is_locked_on_the_own_device(cuda: Cuda) -> None:
    staging = Staging(shared=False, num_threads=1, device=device)
    staging.prepare([40 << 20])
    while not staging.buffers:
        time.sleep(0.001)
    staging.close()
    assert cuda.contexts == {1}, "no other GPU is touched"


def test_each_device_of_a_state_has_its_stream(cuda: Cuda) -> None:
    stage_twice(5, devices={torch.device("cuda", 1), torch.device("cuda", 0), torch.device("cpu")}, cuda=cuda)
    assert cuda.num_streams == 2
    assert {entry[3:] for entry in cuda.log if entry[1] == "wait"} == {(1, ("training", 1)), (0, ("default", 0))}
    assert {entry[3] for entry in cuda.log if entry[1] == "copy"} == {1}, "threads stay on the device of the caller"


def test_a_direct_upload_waits_for_what_the_caller_launched(cuda: Cuda) -> None:
    launched = device.LaunchedWork({torch.device("cuda", 1)})
    thread = threading.Thread(target=launched.wait)
    thread.start()
    thread.join()
    assert cuda.log == [(True, "record", "training", 1), (False, "synchronize", "training", 1)]


def test_without_a_device_nothing_is_asked(cuda: Cuda) -> None:
    stage_twice(5, devices={torch.device("cpu")}, cuda=cuda)
    assert [entry for entry in cuda.log if entry[1] != "copy"] == []
    assert cuda.num_streams == 0
