"""How copies from a device are made: on which device, stream and thread, after what, and into which memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from kit import accelerator
from kit.accelerator import NAME, Gate

from ckptstore.saving.staging import Staging
from ckptstore.state.tensors import device
from ckptstore.state.tensors.device import LaunchedWork

FIRST, SECOND = torch.device(NAME, 0), torch.device(NAME, 1)


class OnDevice:
    """A file whose bytes are those of a tensor; notes the device and the stream of each copy."""

    payloads: Sequence[tuple[int, int]] = ()

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.size_bytes = tensor, tensor.numel()
        self.seen: list[tuple[int, torch.Stream]] = []

    def fill(self, offset: int, target: memoryview) -> None:
        part = self.tensor[offset : offset + len(target)]
        torch.frombuffer(target, dtype=torch.uint8).copy_(part)
        index = torch.accelerator.current_device_index()
        self.seen.append((index, torch.accelerator.current_stream(self.tensor.device)))


@contextmanager
def staging_of(num_threads: int = 3) -> Iterator[Staging]:
    made = Staging(num_threads=num_threads, device=device)
    yield made
    made.close()


def in_thread(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_copies_run_on_one_side_stream_of_the_own_device() -> None:
    torch.accelerator.set_device_index(1)
    training = torch.Stream(SECOND)
    torch.accelerator.set_stream(training)
    large, small = (torch.ones(size, dtype=torch.uint8, device=SECOND) for size in (40 << 20, 5))
    files = [OnDevice(large), OnDevice(small)]
    accelerator.forget_contexts()
    with staging_of() as staging:
        for _ in range(2):
            copies = staging.stage(files, LaunchedWork({SECOND}))
            assert [bytes(one.views[0]) == b"\1" * one.size_bytes for one in copies] == [True, True]
        del copies
    seen = {entry for file in files for entry in file.seen}
    assert len(seen) == 1, "one side stream, however much is copied and however often"
    ((index, stream),) = seen
    assert (index, stream == training) == (1, False)
    assert not accelerator.has_context(0), "no other device is touched"
    assert (torch.accelerator.current_device_index(), torch.accelerator.current_stream()) == (1, training)
    torch.accelerator.set_stream(torch.Stream(SECOND))


def test_copies_wait_for_what_was_launched_before_and_for_nothing_later() -> None:
    tensor = torch.zeros(100, dtype=torch.uint8, device=FIRST)
    with Gate() as before, staging_of() as staging:
        tensor.add_(1)
        launched = LaunchedWork({FIRST})
        with Gate():  # later work that never ends while the copy is made
            tensor.add_(1)
            opener = threading.Timer(0.2, before.open)
            opener.start()
            (copy,) = staging.stage([OnDevice(tensor)], launched)
            assert bytes(copy.views[0]) == b"\1" * 100
            opener.join()
        del copy
    assert tensor.tolist() == [2] * 100


def test_each_device_of_a_state_has_its_stream_and_is_waited_for() -> None:
    torch.accelerator.set_device_index(1)
    tensors = [torch.zeros(100, dtype=torch.uint8, device=where) for where in (FIRST, SECOND)]
    with staging_of() as staging, Gate(0) as first, Gate(1) as second:
        for tensor in tensors:
            tensor.add_(1)
        openers = [threading.Timer(0.1, second.open), threading.Timer(0.2, first.open)]
        for opener in openers:
            opener.start()
        files = [OnDevice(tensor) for tensor in tensors]
        copies = staging.stage(files, LaunchedWork({FIRST, SECOND, torch.device("cpu")}))
        assert [bytes(copy.views[0]) for copy in copies] == [b"\1" * 100] * 2
        for opener in openers:
            opener.join()
        del copies
    assert {index for file in files for index, _ in file.seen} == {1}, "threads stay on the device of the caller"


def test_a_direct_upload_waits_in_any_thread_for_what_the_caller_launched() -> None:
    tensor = torch.zeros(4, device=FIRST)
    with Gate() as gate:
        tensor.add_(1)
        launched = LaunchedWork({FIRST})
        waiting = in_thread(launched.wait)
        waiting.join(0.1)
        assert waiting.is_alive()
        gate.open()
        waiting.join()


def test_memory_is_pinned_where_the_backend_can() -> None:
    before = accelerator.pinned_bytes()
    with staging_of() as staging:
        staging.reserve([3 << 20])
        assert accelerator.pinned_bytes() - before == 4 << 20
        staging.reserve([9 << 20])
        assert accelerator.pinned_bytes() - before == 10 << 20
    assert accelerator.pinned_bytes() == before


def test_no_more_is_pinned_than_makes_sense() -> None:
    assert device.pinned_memory((256 << 20) + 1) is None
    made = device.pinned_memory(192 << 20)
    assert made is not None
    assert (len(made), made.readonly) == (192 << 20, False)


def test_memory_that_is_made_in_the_background_is_pinned_on_the_own_device() -> None:
    torch.accelerator.set_device_index(1)
    accelerator.forget_contexts()
    before = accelerator.pinned_bytes()
    with staging_of(1) as staging:
        staging.prepare([40 << 20])
        while not staging.buffers:
            time.sleep(0.001)
        assert accelerator.pinned_bytes() > before
    assert (accelerator.has_context(0), accelerator.has_context(1)) == (False, True)


def test_a_state_in_host_memory_touches_no_device() -> None:
    accelerator.forget_contexts()
    launched = LaunchedWork({torch.device("cpu"), torch.device("meta")})
    launched.enter_thread()
    launched.wait()
    launched.finish_copies()
    assert not any(map(accelerator.has_context, range(accelerator.DEVICE_COUNT)))
