"""The device module of the stand-in accelerator, `torch.standin`, and the controls of its streams and memory."""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

from ckptstore.testing.accelerator.building import built_extension

NAME = "standin"
"""The type of its devices: `torch.device("standin", 1)`."""
DEVICE_COUNT = 2

_ops: Any = torch.ops.standin
_torch: Any = torch


def load() -> None:
    """Register the stand-in with torch: from here on it is this process's accelerator, for as long as that lives.

    To be called before the first backward pass of the process: autograd counts devices then, and never again. Does
    nothing the second time. Raises CannotBuild where the extension cannot be built, and RuntimeError where the process
    has another accelerator.
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
    """Have no thread of a stream run on while the process ends. A forked one has none."""
    if os.getpid() == process:
        synchronize()


def synchronize() -> None:
    """Wait for all devices. A gate that is shut is waited for."""
    for index in range(DEVICE_COUNT):
        torch.accelerator.synchronize(index)


@contextmanager
def delayed_copies(seconds: float) -> Iterator[None]:
    """Have each copy, to the device, from it and on it, begin that much later than it could."""
    _ops.copy_delay(seconds)
    try:
        yield
    finally:
        _ops.copy_delay(0.0)


def sleep(seconds: float, device: int = 0) -> None:
    """Queue a kernel that takes so long, on the current stream of a device. Returns at once."""
    _ops.sleep(device, seconds)


class Gate:
    """A kernel on the current stream of a device that ends when it is opened: what is queued later waits for that."""

    def __init__(self, device: int = 0) -> None:
        self._number = _ops.put_gate(device)

    def open(self) -> None:
        """Let the work behind it go on. The second time nothing happens."""
        _ops.open_gate(self._number)

    def __enter__(self) -> Gate:
        return self

    def __exit__(self, *_: object) -> None:
        self.open()


@contextmanager
def limited_memory(size_bytes: int, device: int = 0) -> Iterator[None]:
    """Have a device that is full at so many bytes; tensors count with the next power of two, at least 512 bytes.
    torch.OutOfMemoryError says so."""
    _, total_bytes = torch.accelerator.get_memory_info(device)
    _ops.set_limit(device, size_bytes)
    try:
        yield
    finally:
        _ops.set_limit(device, total_bytes)


def draw_from_host() -> None:
    """Have the devices take their random numbers from the host's generator from now on: what is drawn on
    a device is what the host would have drawn, for tests that compare the two."""
    _ops.draw_from_host(True)


def has_context(device: int) -> bool:
    """Whether anything was allocated, queued or chosen on a device since `forget_contexts`."""
    return bool(_ops.has_context(device))


def forget_contexts() -> None:
    """Have `has_context` begin anew."""
    _ops.forget_contexts()


def pinned_bytes() -> int:
    """How much pinned memory of the host there is."""
    return int(_ops.pinned_bytes())


def _index(device: Any) -> int:
    if isinstance(device, int):
        return device
    index: int | None = torch.device(device).index
    return torch.accelerator.current_device_index() if index is None else index


def _device_module() -> Any:
    """What torch asks of `torch.<name>`."""
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
