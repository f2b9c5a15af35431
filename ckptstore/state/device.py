"""Copies from a CUDA device to the host at the speed of the bus: locked memory, and a stream of their own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
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


@contextmanager
def copy_stream() -> Iterator[None]:
    """Make copies of this thread wait for what has been launched so far, and for nothing that is launched later.

    They are finished when the context is left. Without CUDA it does nothing.
    """
    if not _cuda.is_available():
        yield
        return
    stream = _cuda.Stream()
    stream.wait_stream(_cuda.default_stream())
    with _cuda.stream(stream):
        yield
    stream.synchronize()
