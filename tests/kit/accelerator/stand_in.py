"""The device module of the stand-in accelerator, `torch.standin`, and the controls of its streams and memory."""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

from kit.accelerator.building import built_extension

NAME = "standin"
"""The type of its devices: `torch.device("standin", 1)`."""
DEVICE_COUNT = 2

_ops: Any = torch.ops.standin
_torch: Any = torch


def load() -> None:
    """Register the stand-in with torch: it becomes this process's accelerator for good.

    Call it before the first backward pass of the process: autograd counts devices then, and never again. Does nothing
    the second time. Raises CannotBuild if the extension cannot be built, and RuntimeError if the process has another
    accelerator.
    """
    if hasattr(torch, NAME):
        return
    if torch.accelerator.is_available():
        raise RuntimeError(f"this process has an accelerator: {torch.accelerator.current_accelerator()}")
    library = built_extension()
    _torch.utils.rename_privateuse1_backend(NAME)
    _torch._register_device_module(NAME, _device_module())
    _torch.ops.load_library(str(library))
    _torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    atexit.register(_finish, os.getpid())


def _finish(process: int) -> None:
    """Let no thread of a stream outlive the process. A forked one has none."""
    if os.getpid() == process:
        synchronize()


def synchronize() -> None:
    """Wait for all devices, closed gates included."""
    for index in range(DEVICE_COUNT):
        torch.accelerator.synchronize(index)


@contextmanager
def delayed_copies(seconds: float) -> Iterator[None]:
    """Delay the start of each copy, to the device, from it and on it."""
    _ops.copy_delay(seconds)
    try:
        yield
    finally:
        _ops.copy_delay(0.0)


def sleep(seconds: float, device: int = 0) -> None:
    """Queue a kernel of that duration on the current stream of a device. Returns at once."""
    _ops.sleep(device, seconds)


class Gate:
    """A kernel on the current stream of a device that ends when it is opened: later work waits for it."""

    def __init__(self, device: int = 0) -> None:
        self._number = _ops.put_gate(device)

    def open(self) -> None:
        """Let the work behind it continue. Does nothing the second time."""
        _ops.open_gate(self._number)

    def __enter__(self) -> Gate:
        return self

    def __exit__(self, *_: object) -> None:
        self.open()


@contextmanager
def limited_memory(size_bytes: int, device: int = 0) -> Iterator[None]:
    """Limit the memory of a device; tensors count with the next power of two, at least 512 bytes.

    A full device raises torch.OutOfMemoryError.
    """
    _, total_bytes = torch.accelerator.get_memory_info(device)
    _ops.set_limit(device, size_bytes)
    try:
        yield
    finally:
        _ops.set_limit(device, total_bytes)


def draw_from_host() -> None:
    """Draw the devices' random numbers from the host's generator from now on, for tests that compare the two."""
    _ops.draw_from_host(True)


def has_context(device: int) -> bool:
    """True if anything was allocated, queued or chosen on a device since `forget_contexts`."""
    return bool(_ops.has_context(device))


def forget_contexts() -> None:
    """Reset `has_context`."""
    _ops.forget_contexts()


def pinned_bytes() -> int:
    """Return the bytes of pinned host memory."""
    return int(_ops.pinned_bytes())


def _index(device: Any) -> int:
    if isinstance(device, int):
        return device
    index: int | None = torch.device(device).index
    return torch.accelerator.current_device_index() if index is None else index


def _device_module() -> Any:
    """Create the module `torch.<name>` with the functions that torch requires."""
    made: Any = ModuleType(f"torch.{NAME}")
    made.is_available = lambda: True
    made.is_initialized = lambda: True
    made.device_count = lambda: DEVICE_COUNT
    made.current_device = torch.accelerator.current_device_index
    made.set_device = torch.accelerator.set_device_index
    made.synchronize = torch.accelerator.synchronize
    made.current_stream = torch.accelerator.current_stream
    made.set_stream = torch.accelerator.set_stream
    made.Stream, made.Event, made.stream = torch.Stream, torch.Event, lambda stream: stream
    made.device = lambda device: torch.accelerator.device_index(_index(device))
    made.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    made._is_in_bad_fork = lambda: bool(_ops.is_forked())
    made.manual_seed = lambda seed: _ops.seed(torch.accelerator.current_device_index(), seed)
    made.manual_seed_all = lambda seed: [_ops.seed(index, seed) for index in range(DEVICE_COUNT)]
    made.get_rng_state = lambda device=NAME: _ops.random_state(_index(device))
    made.set_rng_state = lambda state, device=NAME: _ops.set_random_state(_index(device), state)
    return made
