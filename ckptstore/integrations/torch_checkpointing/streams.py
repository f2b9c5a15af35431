"""Streams: one collects a file and stores it when it is closed, one reads a file and checks each block."""

from __future__ import annotations

import io
import warnings
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import itemgetter
from types import TracebackType
from typing import Any

import torch

from ckptstore.errors import CkptstoreError
from ckptstore.format.digest import BLOCK_BYTES, Digest
from ckptstore.transfer import RangeRead, Transfer

_OWN_CHUNK_BYTES = 1 << 20


class WriteStream(io.RawIOBase):
    """Collects written bytes. Leaving its context, or closing it, stores the file; an error on the way drops it.

    The memory of `data`'s tensors on the CPU is not copied: `torch.save` passes it as it is.
    """

    def __init__(self, store: Callable[[Sequence[memoryview]], None], data: object = None) -> None:
        super().__init__()
        self._store: Callable[[Sequence[memoryview]], None] | None = store
        self._data = data
        self._lasting = sorted(_memory_of(data).items())
        self._views: list[memoryview] = []
        self._own = bytearray()

    def writable(self) -> bool:
        """True."""
        return True

    def write(self, data: Any, /) -> int:
        """Take the bytes. They are not stored yet."""
        if self._store is None:
            raise ValueError("The stream is closed")
        view = memoryview(data).cast("B")
        if len(view) >= _OWN_CHUNK_BYTES:
            self._end_own()
            self._views.append(view if self._is_lasting(view) else memoryview(bytes(view)))
        else:
            self._own += view
            if len(self._own) >= _OWN_CHUNK_BYTES:
                self._end_own()
        return len(view)

    def close(self) -> None:
        """Store the file: it is durable, and seen by all ranks, when this returns."""
        store, self._store = self._store, None
        try:
            if store is not None:
                self._end_own()
                store(self._views)
        finally:
            self._views, self._lasting, self._data = [], [], None
            super().close()

    def abort(self) -> None:
        """Drop the bytes; nothing is stored."""
        self._store = None
        self.close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is not None:
            self.abort()
        else:
            self.close()

    def __del__(self) -> None:  # an unclosed stream must not become a file
        self._store = None

    def _end_own(self) -> None:
        if self._own:
            self._views.append(memoryview(self._own))
            self._own = bytearray()

    def _is_lasting(self, view: memoryview) -> bool:
        if not self._lasting:
            return False
        start = _address(view)
        index = bisect_right(self._lasting, start, key=itemgetter(0)) - 1
        return index >= 0 and start + len(view) <= self._lasting[index][1]


def _address(view: memoryview) -> int:
    """Return the address of a view's bytes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the view may be read-only, and nothing is written
        return int(torch.frombuffer(view, dtype=torch.uint8).data_ptr())


def _memory_of(data: object) -> dict[int, int]:
    """Map the first address of each tensor in a nested state to its last, for tensors in this process's memory."""
    found: dict[int, int] = {}
    seen: set[int] = set()
    left = [data]
    while left:
        item = left.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            local = getattr(item, "_local_tensor", item)  # of a DTensor
            with suppress(RuntimeError, NotImplementedError):  # a wrapper without memory of its own is copied
                if local.device.type == "cpu" and local.layout == torch.strided:
                    storage = local.untyped_storage()
                    found[storage.data_ptr()] = storage.data_ptr() + storage.nbytes()
        elif isinstance(item, Mapping):
            left += item.values()
        elif isinstance(item, list | tuple):
            left += item
    return found


@dataclass(frozen=True, slots=True)
class CheckedFile:
    """A stored file with the known digest of every block."""

    key: str
    size_bytes: int
    block_digests: Sequence[Digest]

    def read_into(self, transfer: Transfer, offset: int, view: memoryview) -> None:
        """Fill the view from the start of a block, up to the end of one or of the file. Raises CheckpointDamaged."""
        if not len(view):
            return
        first = offset // BLOCK_BYTES
        sizes = [min(BLOCK_BYTES, len(view) - at) for at in range(0, len(view), BLOCK_BYTES)]
        checks = tuple((size, self.block_digests[first + index]) for index, size in enumerate(sizes))
        transfer.read([RangeRead(self.key, offset, (view,), checks)])

    def read(self, transfer: Transfer) -> bytearray:
        """Read the whole file, checked."""
        data = bytearray(self.size_bytes)
        self.read_into(transfer, 0, memoryview(data))
        return data


class ReadStream(io.RawIOBase):
    """Reads a stored file from any offset. Whole blocks go to the caller's memory; the last partial one is cached."""

    def __init__(self, transfer: Transfer, file: CheckedFile) -> None:
        super().__init__()
        self._transfer = transfer
        self._file = file
        self._position = 0
        self._block_start = -1
        self._block = bytearray()

    def readable(self) -> bool:
        """True."""
        return True

    def seekable(self) -> bool:
        """True."""
        return True

    def tell(self) -> int:
        """Return the offset of the next byte."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Go to an offset; behind the end nothing is read."""
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._file.size_bytes}[whence]
        if start + offset < 0:
            raise ValueError(f"The offset {start + offset} is below 0")
        self._position = start + offset
        return self._position

    def readinto(self, buffer: Any, /) -> int:
        """Fill the buffer, as far as the file goes. Raises CheckpointDamaged for a block with a wrong digest."""
        if self.closed:
            raise ValueError("The stream is closed")
        failed: CkptstoreError | None = None
        done = 0
        with memoryview(buffer).cast("B") as whole, whole[: max(0, self._file.size_bytes - self._position)] as view:
            try:
                while done < len(view):
                    done += self._read_some(view[done:])
            except CkptstoreError as error:
                # The frames in a traceback hold on to the buffer; a caller whose buffer is an mmap has to close it.
                failed = error.with_traceback(None)
                failed.__cause__ = failed.__context__ = None
        if failed is not None:
            raise failed
        return done

    def _read_some(self, view: memoryview) -> int:
        inside = self._position % BLOCK_BYTES
        is_to_end = self._position + len(view) == self._file.size_bytes
        whole = len(view) if is_to_end else len(view) // BLOCK_BYTES * BLOCK_BYTES
        if inside == 0 and whole:
            self._file.read_into(self._transfer, self._position, view[:whole])
            self._position += whole
            return whole
        block = self._block_at(self._position - inside)
        part = memoryview(block)[inside : inside + len(view)]
        view[: len(part)] = part
        self._position += len(part)
        return len(part)

    def _block_at(self, start: int) -> bytearray:
        if self._block_start != start:
            block = bytearray(min(BLOCK_BYTES, self._file.size_bytes - start))
            self._file.read_into(self._transfer, start, memoryview(block))
            self._block_start, self._block = start, block
        return self._block
