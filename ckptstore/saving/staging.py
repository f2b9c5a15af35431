"""Copy the state to memory that is kept from save to save, so that training may go on during the upload.

The copy has the layout of the files, so each upload reads one view of one buffer. Buffers are allocated once.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from ckptstore.errors import InvalidState
from ckptstore.runtime.free_memory import tightest_room
from ckptstore.runtime.new_memory import new_memory, populate
from ckptstore.runtime.parallel import mapped, started
from ckptstore.state.tensors.device import LaunchedWork
from ckptstore.state.tensors.segments import SegmentSource
from ckptstore.transfer.sources import MemorySource

_COPY_BYTES = 8 << 20
"""The bytes that one thread copies at once."""
_ROUND_BYTES = 2 << 20
"""The unit of buffer sizes: a huge page."""
_PREPARED_BYTES = 32 << 20
"""The least memory that is allocated in the background. Less costs a save only some milliseconds."""
_PREPARED_SHARE = 0.25
"""The share of the memory of the machine, or container, that allocation in the background leaves free."""
_UNUSED_SECONDS = 3600.0
"""The time for which memory that was allocated in the background waits for a save."""
_NICE = 10

logger = logging.getLogger("ckptstore")


class Device(Protocol):
    """Copies from an accelerator; see `ckptstore.state.tensors.device`."""

    def lock_memory(self, address: int, size_bytes: int) -> bool:
        """Pin memory, so that it is a fast target of copies. Return True on success."""

    def unlock_memory(self, address: int) -> None:
        """Undo `lock_memory`."""

    def pinned_memory(self, size_bytes: int) -> memoryview | None:
        """Allocate pinned memory, if the device cannot pin existing memory; else return None.

        The memory lives as long as a view of it.
        """

    def entrance(self) -> Callable[[], None]:
        """Return a function that another thread calls before it pins memory for the devices of this thread."""


class Buffer:
    """Memory of this process that is large enough for one file."""

    def __init__(self, size_bytes: int, *, device: Device) -> None:
        size_bytes = max(_ROUND_BYTES, -(-size_bytes // _ROUND_BYTES) * _ROUND_BYTES)
        self.memory: mmap.mmap | memoryview = device.pinned_memory(size_bytes) or new_memory(size_bytes)
        self.is_new = True
        """True if the system may not have provided all of its pages yet."""
        self.view = memoryview(self.memory)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        is_locked = isinstance(self.memory, mmap.mmap) and device.lock_memory(self.address, size_bytes)
        self._unlock = device.unlock_memory if is_locked else None

    @property
    def size_bytes(self) -> int:
        """The capacity of the buffer."""
        return len(self.memory)

    def populate(self, start: int = 0, stop: int | None = None) -> None:
        """Have the system provide the pages now, not one by one during a copy."""
        if isinstance(self.memory, memoryview):  # pinned memory has its pages
            return
        populate(self.memory, start, len(self.memory) if stop is None else min(stop, len(self.memory)))

    def close(self) -> None:
        """Free the memory as soon as no view of it is left."""
        if self._unlock is not None:
            self._unlock(self.address)
            self._unlock = None
        self.view.release()
        if isinstance(self.memory, memoryview):
            self.memory.release()


class Staging:
    """The buffers of one store in one process, for one save at a time."""

    def __init__(self, *, num_threads: int, device: Device) -> None:
        self._device = device
        self._num_threads = num_threads
        self.buffers: list[Buffer] = []
        self._preparing: threading.Thread | None = None
        self._is_wanted = threading.Event()

    def prepare(self, sizes_bytes: Sequence[int]) -> None:
        """Allocate buffers for files of these sizes in the background, on a thread with low priority.

        It stops when memory gets scarce, or when a save needs the buffers and takes those that are ready. Buffers that
        no save has used for an hour are freed.
        """
        if self.buffers or self._preparing is not None or sum(sizes_bytes) < _PREPARED_BYTES:
            return
        ahead = partial(self._make_ahead, tuple(sizes_bytes), self._device.entrance())
        self._preparing = started(ahead, name="ckptstore-prepare")

    @property
    def is_unused(self) -> bool:
        """True if all buffers were prepared in the background and none was used."""
        return self._preparing is not None

    def _make_ahead(self, sizes_bytes: Sequence[int], enter_device: Callable[[], None]) -> None:
        with contextlib.suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        made_bytes = 0
        try:
            enter_device()
            for size_bytes in sizes_bytes:
                self.buffers.append(buffer := Buffer(size_bytes, device=self._device))
                for start in range(0, buffer.size_bytes, _COPY_BYTES):
                    room = tightest_room()
                    if self._is_wanted.is_set() or room is None or room.share < _PREPARED_SHARE:
                        raise MemoryError("it is enough for now")
                    buffer.populate(start, start + _COPY_BYTES)
                    made_bytes += _COPY_BYTES
                buffer.is_new = False
        except (OSError, MemoryError, RuntimeError) as error:
            logger.debug("%d bytes are ready for the next save_async (%r)", made_bytes, error)
        if not self._is_wanted.wait(_UNUSED_SECONDS):
            self._release()

    def _settle(self) -> None:
        """Stop the preparation, and keep the buffers that are ready."""
        if self._preparing is not None:
            self._is_wanted.set()
            self._preparing.join()
            self._preparing = None
            self._is_wanted.clear()

    def reserve(self, sizes_bytes: Sequence[int]) -> None:
        """Allocate and populate buffers for files of these sizes."""
        self._settle()
        fresh = self._fit(sizes_bytes)
        mapped(Buffer.populate, fresh, num_threads=self._num_threads, name="ckptstore-staging")
        for buffer in fresh:
            buffer.is_new = False

    def stage(self, files: Sequence[SegmentSource], launched: LaunchedWork) -> list[MemorySource]:
        """Copy all files into buffers, and return the copies in the same order. They have the bytes that the files have
        once `launched` is finished.

        The copies of an earlier call must not be in use any more. Raises InvalidState if memory is insufficient.
        """
        self._settle()
        self._fit([file.size_bytes for file in files])
        pieces = [
            (file, buffer, start)
            for file, buffer in zip(files, self.buffers, strict=False)
            for start in range(0, file.size_bytes, _COPY_BYTES)
        ]
        mapped(
            lambda piece: _copy(*piece),
            pieces,
            num_threads=self._num_threads,
            name="ckptstore-staging",
            begin=launched.enter_thread,
        )
        launched.finish_copies()
        for buffer in self.buffers:
            buffer.is_new = False
        return [
            MemorySource((buffer.view[: file.size_bytes],), payloads=file.payloads)
            for file, buffer in zip(files, self.buffers, strict=False)
        ]

    def close(self) -> None:
        """Free all memory."""
        self._settle()
        self._release()

    def _release(self) -> None:
        for buffer in self.buffers:
            buffer.close()
        self.buffers = []

    def _fit(self, sizes_bytes: Sequence[int]) -> list[Buffer]:
        """Make the buffers large enough for these files, in order, and return the new ones."""
        fresh = []
        for index, size_bytes in enumerate(sizes_bytes):
            if index < len(self.buffers) and self.buffers[index].size_bytes >= size_bytes:
                continue
            try:
                buffer = Buffer(size_bytes, device=self._device)
            except (OSError, MemoryError) as error:
                raise InvalidState(
                    f"There is no memory to stage {sum(sizes_bytes)} bytes: {error}",
                    hint="Save synchronously, or shard the state over more ranks",
                ) from error
            fresh.append(buffer)
            if index < len(self.buffers):
                self.buffers[index].close()
                self.buffers[index] = buffer
            else:
                self.buffers.append(buffer)
        return fresh


def _copy(file: SegmentSource, buffer: Buffer, start: int) -> None:
    """Copy one stretch of a file to its place in the buffer."""
    stop = min(start + _COPY_BYTES, file.size_bytes)
    if buffer.is_new:  # faster than page by page
        buffer.populate(start, stop)
    file.fill(start, buffer.view[start:stop])
