"""Copies from a CUDA device to the host at the speed of the bus: locked memory, and a stream of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch

_cuda: Any = torch.cuda
_PORTABLE = 1
"""cudaHostRegisterPortable: locked for all devices."""


def lock_memory(address: int, size_bytes: int) -> bool:
    """Have CUDA lock host memory, so that copies from a device need no other buffer; whether it is locked now.

    False without CUDA, and where the system allows no more locked memory: copies are slower then, nothing else.
    """
    if not _cuda.is_available():
        return False
    return int(_cuda.cudart().cudaHostRegister(address, size_bytes, _PORTABLE)) == 0


def unlock_memory(address: int) -> None:
    """Undo `lock_memory`, before the memory is given back."""
    _cuda.cudart().cudaHostUnregister(address)


def entrance() -> Callable[[], None]:
    """Made in the thread that saves: has another one work on the same device. A new thread begins on device 0, and CUDA
    takes memory of the device on which a thread first locks some. Where CUDA is not in use nothing is done."""
    if not _cuda.is_initialized():
        return lambda: None
    here = _cuda.current_device()
    return lambda: _cuda.set_device(here)


class LaunchedWork:
    """What the calling thread has launched so far on some devices; the bytes of their tensors are final after it.

    Made in the thread that saves: current device and current streams are a thread's own, and a new thread begins on
    device 0, where it has no business. Without CUDA devices nothing is done.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        indices = {device.index for device in devices if device.type == "cuda"}
        here = _cuda.current_device() if indices else None
        self._indices = sorted(indices, key=lambda index: (index == here, index))
        """The device of the calling thread comes last, so that other threads stay on it."""
        self._events = []
        for index in self._indices:
            event = _cuda.Event()
            event.record(_cuda.current_stream(index))
            self._events.append(event)

    def wait(self) -> None:
        """Wait for it, in any thread."""
        for event in self._events:
            event.synchronize()

    def enter_thread(self) -> None:
        """Have the copies of a new thread wait for it, and for nothing that is launched later."""
        for index, event in zip(self._indices, self._events, strict=True):
            stream = _side_stream(index)
            _cuda.set_stream(stream)  # the device of the stream becomes the thread's too
            stream.wait_event(event)

    def finish_copies(self) -> None:
        """Wait for the copies of all threads that were entered."""
        for index in self._indices:
            done = _cuda.Event()
            done.record(_side_stream(index))
            done.synchronize()


@cache
def _side_stream(index: int) -> Any:
    """One for each device, for as long as the process lives."""
    return _cuda.Stream(device=index)
