"""Write past the page cache, for files that must reach the disk at once anyway.

A buffered write that is fsynced in the end copies the bytes into memory that the training could use, waits while much
of that memory is not on the disk yet, and then waits for the disk all the same. A direct one hands over the caller's
memory if it is aligned as the disk requires, else that of an aligned buffer (open(2), O_DIRECT; statx(2),
STATX_DIOALIGN).
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import threading
from collections.abc import Sequence

from ckptstore.runtime.new_memory import HUGE_BYTES, new_memory
from ckptstore.storage.disk import posix

_ALIGN_BYTES = 4096
"""An alignment that every disk accepts, for systems that do not report the required one."""


class DirectFile:
    """A descriptor that was opened with O_DIRECT, for the parts of one file. Safe for threads."""

    def __init__(self, descriptor: int) -> None:
        """Do not take over the descriptor, which the caller closes."""
        self._descriptor = descriptor
        self._is_direct = True
        memory, offset = posix.direct_alignment(descriptor)
        self._memory_align_bytes = memory or _ALIGN_BYTES
        self._offset_align_bytes = offset or _ALIGN_BYTES
        self._rest: list[tuple[int, bytes]] = []

    def write(self, views: Sequence[memoryview], offset: int) -> None:
        """Write the views one after another; less than a block at their end waits for `finish`. Raises OSError."""
        views = [view for view in views if len(view)]
        size_bytes = sum(map(len, views))
        whole_bytes = size_bytes - size_bytes % self._offset_align_bytes
        if self._is_direct and offset % self._offset_align_bytes == 0:
            try:
                if whole_bytes:
                    blocks = views if all(map(self._is_aligned, views)) else [_gathered(views, whole_bytes)]
                    posix.write_whole(self._descriptor, blocks, offset)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._end()  # the disk requires more than the system reports
            else:
                if rest := b"".join(posix.after(views, whole_bytes)):
                    self._rest.append((offset + whole_bytes, rest))
                return
        self._end()
        posix.write_at(self._descriptor, views, offset)

    def finish(self) -> None:
        """Write the remaining ends of parts. Called once, after all parts. Raises OSError."""
        self._end()
        for offset, data in self._rest:
            posix.write_at(self._descriptor, [memoryview(data)], offset)

    def _is_aligned(self, view: memoryview) -> bool:
        if view.readonly or len(view) % self._offset_align_bytes:
            return False
        return _address(view) % self._memory_align_bytes == 0

    def _end(self) -> None:
        """Write through the page cache from now on; a write in progress on another thread may go either way."""
        if self._is_direct:
            self._is_direct = False
            flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)


class _Buffers(threading.local):
    view = memoryview(bytearray())


_buffers = _Buffers()
"""Each thread's aligned buffer, as large as its largest write so far; freed with the thread."""


def _gathered(views: Sequence[memoryview], size_bytes: int) -> memoryview:
    """Copy the first bytes of the views, one after another, to aligned memory, valid until this thread's next call."""
    whole = _buffers.view
    if len(whole) < size_bytes:
        whole = _buffers.view = _aligned(size_bytes)
    start, used = _address(whole), 0
    for view in views:
        count = min(len(view), size_bytes - used)
        if view.readonly:
            whole[used : used + count] = view[:count]
        else:
            ctypes.memmove(start + used, _address(view), count)  # other threads run meanwhile
        used += count
    return whole[:size_bytes]


def _aligned(size_bytes: int) -> memoryview:
    """Return aligned memory in huge pages, if the system has them."""
    # A disk takes a megabyte of huge pages in one piece; small ones are a few hundred pieces, in several requests.
    room_bytes = -(-size_bytes // HUGE_BYTES) * HUGE_BYTES + HUGE_BYTES
    view = memoryview(new_memory(room_bytes))
    return view[-_address(view) % HUGE_BYTES :]


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
