"""Copies from an accelerator to the host at the speed of the bus: pinned memory, and a separate stream.

Every accelerator that torch knows is used the same way, by `torch.accelerator`, `torch.Stream` and `torch.Event`. Only
CUDA and ROCm can pin existing memory: `lock_memory`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch

_accelerator: Any = torch.accelerator
_cuda: Any = torch.cuda
_PORTABLE = 1
"""cudaHostRegisterPortable: locked for all devices."""
_SMALL_WASTE_BYTES = 64 << 20


def lock_memory(address: int, size_bytes: int) -> bool:
    """Pin host memory, so that copies from a device need no other buffer. Return True if it is pinned now.

    Return False without CUDA or ROCm, and if the system allows no more locked memory. Copies are slower then, and still
    correct.
    """
    if not _cuda.is_available():
        return False
    return int(_cuda.cudart().cudaHostRegister(address, size_bytes, _PORTABLE)) == 0


def unlock_memory(address: int) -> None:
    """Undo `lock_memory`, before the memory is freed."""
    _cuda.cudart().cudaHostUnregister(address)


def pinned_memory(size_bytes: int) -> memoryview | None:
    """Return new pinned host memory if the accelerator can make some and cannot pin existing memory; else None.

    The memory is writable, and nothing has been written to it. It belongs to the caller for as long as the view lives;
    the backend may keep it for the next caller afterwards. Backends round up to a power of two. Return None too if that
    is more than a quarter, and 64 MiB, above the requested size: copies into pageable memory are slow, but to be out of
    memory is worse.
    """
    if kind_of_accelerator() in (None, "cuda") or not _accelerator.is_available():
        return None
    rounded_bytes = 1 << (size_bytes - 1).bit_length()
    if rounded_bytes - size_bytes > max(size_bytes // 4, _SMALL_WASTE_BYTES):
        return None
    try:
        made: Any = torch.empty(size_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)
    except (RuntimeError, NotImplementedError):  # the backend makes none, or no more
        return None
    return memoryview(made.numpy()) if made.is_pinned() else None


def kind_of_accelerator() -> str | None:
    """Return the device type of the accelerator that torch was built for or that registered ("cuda" for ROCm too), None
    if there is none. Do not check that a device exists, which would start the backend."""
    found = _accelerator.current_accelerator()
    return None if found is None else str(found.type)


def entrance() -> Callable[[], None]:
    """Return a function that another thread calls to work on the device of the calling thread.

    The function does nothing if no accelerator is in use.
    """
    # A new thread begins on device 0, and a backend takes memory of the device on which a thread first pins some.
    kind = kind_of_accelerator()
    module: Any = None if kind is None else torch.get_device_module(kind)
    if module is None or not getattr(module, "is_initialized", module.is_available)():
        return lambda: None
    here = _accelerator.current_device_index()
    return lambda: _accelerator.set_device_index(here)


class LaunchedWork:
    """The work that the calling thread has launched so far on some devices; the tensors' bytes are final after it.

    Create it in the thread that saves. It does nothing if all tensors are in host memory.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        # Current device and current streams belong to a thread, and a new thread begins on device 0, which it must not
        # use.
        kind = kind_of_accelerator()
        indices = {device.index for device in devices if device.type == kind}
        here = _accelerator.current_device_index() if indices else None
        self._indices = sorted(indices, key=lambda index: (index == here, index))
        """The device of the calling thread comes last, so that other threads stay on it."""
        self._events = []
        for index in self._indices:
            event = torch.Event(torch.device(str(kind), index))
            event.record(_accelerator.current_stream(index))
            self._events.append(event)

    def wait(self) -> None:
        """Wait for the work, in any thread."""
        for event in self._events:
            event.synchronize()

    def enter_thread(self) -> None:
        """Make the copies of a new thread wait for the work, and for nothing that is launched later."""
        for index, event in zip(self._indices, self._events, strict=True):
            stream = _side_stream(index)
            _accelerator.set_stream(stream)  # the device of the stream becomes the thread's too
            stream.wait_event(event)

    def finish_copies(self) -> None:
        """Wait for the copies of all threads that called `enter_thread`."""
        for index in self._indices:
            _side_stream(index).synchronize()


@cache
def _side_stream(index: int) -> Any:
    return torch.Stream(torch.device(str(kind_of_accelerator()), index))
