"""Allocate memory that is new to this process: in huge pages, unless the system is slow to provide these.

A system provides a huge page in a fraction of the time of the small ones that it replaces. But a virtual machine may
hand free memory back to its host: it does so in huge pages, and gets them back one slow fault after another, while
smaller pieces of memory stay with it (Linux, Documentation/mm/free_page_reporting.rst). The time of the first pages
shows the case: from a slow one on, this process takes small ones.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import time
from typing import Any

HUGE_BYTES = 2 << 20
"""The size of a huge page, on most machines."""
_SLOW_SECONDS = 0.0015
"""The processor time for one huge page above which its small pages are faster."""
_MADV_POPULATE_WRITE = 23
"""A constant of Linux 5.14, for which the module mmap has no name."""
_UNKNOWN = frozenset({errno.EINVAL, errno.ENOSYS})
"""The errors of a system without it."""
_libc: Any = ctypes.CDLL(None, use_errno=True)


class _Pages:
    are_slow = False
    """True once a huge page was slow."""


def new_memory(size_bytes: int) -> mmap.mmap:
    """Return memory of this process alone, all zeros; the first pages of a large one are populated. Raises OSError."""
    memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size_bytes >= HUGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_NOHUGEPAGE if _Pages.are_slow else mmap.MADV_HUGEPAGE)
        if not _Pages.are_slow and size_bytes > HUGE_BYTES:
            populate(memory, 0, HUGE_BYTES)
    return memory


def populate(memory: mmap.mmap, start: int, stop: int) -> None:
    """Have the system provide a stretch of new memory now, not page by page on its first use.

    Call it before that use: where the system has no call for it, zeros are written. The interpreter lock is free
    meanwhile. From a slow huge page on small pages are used. Raises OSError when there is no memory for it.
    """
    while start < stop:
        end = stop if _Pages.are_slow else min(stop, start + HUGE_BYTES)
        begun = time.thread_time()  # without the time in which other threads had the processor
        _touch(memory, start, end)
        if not _Pages.are_slow and time.thread_time() - begun > _SLOW_SECONDS:
            _Pages.are_slow = True
        if _Pages.are_slow and hasattr(mmap, "MADV_NOHUGEPAGE"):
            with contextlib.suppress(OSError):
                memory.madvise(mmap.MADV_NOHUGEPAGE)
        start = end


def _touch(memory: mmap.mmap, start: int, stop: int) -> None:
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    page_start = start - start % mmap.PAGESIZE
    length = ctypes.c_size_t(stop - page_start)
    if _libc.madvise(ctypes.c_void_p(address + page_start), length, _MADV_POPULATE_WRITE) != 0:
        code = ctypes.get_errno()
        if code not in _UNKNOWN:  # to write there would end the process
            raise OSError(code, os.strerror(code))
        ctypes.memset(address + start, 0, stop - start)
