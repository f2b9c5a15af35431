"""A safetensors file that is made while it is read, from stored tensors. It never exists as a whole.

The position of each byte is known before the first one is read. So the file can be written in the parts that a storage
wants, and its bytes pass through two windows of memory, whatever the sizes of the file and of its tensors.
"""

from __future__ import annotations

import mmap
import threading
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate

import torch

from ckptstore.interchange.safetensors_file import SafetensorsEntry
from ckptstore.interchange.streaming import boxes_of_stretch
from ckptstore.state.read.stored import StoredState
from ckptstore.state.tensors.tensor_memory import view_of
from ckptstore.transfer.sources import Read

WINDOW_BYTES = 16 << 20
"""Bytes read at once. A multiple of every element's size, so that no element spans two windows."""
_NUM_WINDOWS = 2
"""Parts are requested roughly in order: the window before may still be needed."""
_BUFFER_BYTES = 32 << 20
"""The most memory for buffers beside a window, for pieces whose order in the checkpoint and the file differ."""


class SafetensorsSource:
    """A `Source`: header and tensors, in this order. Every block of the checkpoint is checked as it is read.

    One window is read at a time, itself in parallel; threads write the parts concurrently.
    """

    payloads: Sequence[tuple[int, int]] = ()
    in_memory = False

    def __init__(
        self, stored: StoredState, head: bytes, entries: Sequence[SafetensorsEntry], keys: Mapping[str, str]
    ) -> None:
        """Create the source; `keys` maps each tensor's name to its key in the checkpoint."""
        stored.buffer_bytes = _BUFFER_BYTES
        self._stored = stored
        self._head = head
        self._entries = entries
        self._keys = keys
        *self._starts, self._size_bytes = accumulate((entry.size_bytes for entry in entries), initial=len(head))
        self._lock = threading.Lock()
        self._windows: dict[int, torch.Tensor] = {}
        """By position in the file, oldest first."""

    @property
    def size_bytes(self) -> int:
        """The bytes of the file."""
        return self._size_bytes

    @contextmanager
    def open(self) -> Iterator[Read]:
        """Yield a function that reads the file. Reading raises CheckpointDamaged."""
        yield self._read

    def _read(self, offset: int, size_bytes: int, scratch: memoryview) -> Sequence[memoryview]:
        view, done = scratch[:size_bytes], 0
        with self._lock:
            while done < size_bytes:
                number, start = divmod(offset + done, WINDOW_BYTES)
                found = self._window(number)[start : start + size_bytes - done]
                view[done : done + len(found)] = found
                done += len(found)
        return [view]

    def _window(self, number: int) -> memoryview:
        window = self._windows.get(number)
        if window is None:
            if len(self._windows) < _NUM_WINDOWS:
                window = _new_window(min(WINDOW_BYTES, self._size_bytes))
            else:
                window = self._windows.pop(next(iter(self._windows)))
            self._fill(window, number * WINDOW_BYTES)  # stays unreachable after an error
            self._windows[number] = window
        return view_of(window)

    def _fill(self, memory: torch.Tensor, begin: int) -> None:
        """Read the bytes of the file from `begin` on."""
        end = min(begin + WINDOW_BYTES, self._size_bytes)
        head = self._head[begin:end]
        view_of(memory)[: len(head)] = head
        wanted = []
        for index in range(max(0, bisect_right(self._starts, begin) - 1), len(self._entries)):
            start, entry = self._starts[index], self._entries[index]
            if start >= end:
                break
            first, last = max(start, begin), min(start + entry.size_bytes, end)
            if first < last:
                key = self._keys[entry.name]
                stretch = memory[first - begin : last - begin]
                wanted += [(key, *piece) for piece in boxes_of_stretch(self._stored, key, first - start, stretch)]
        self._stored.fill_boxes(wanted)


def _new_window(size_bytes: int) -> torch.Tensor:
    """Map memory that returns to the system when unused; the heaps of several threads would keep it."""
    memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=torch.uint8)
