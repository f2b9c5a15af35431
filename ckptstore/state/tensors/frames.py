"""Frames: the bytes around one tensor that make it a file of `torch.save`, and the place of the payload in such a file.

A frame is a zip archive of three stored entries: the pickle that torch makes for a plain contiguous CPU tensor of that
dtype and shape, torch's version mark, and the payload. It is written as header, tensor memory, trailer, so that the
payload is never copied. The payload's CRC-32 in the archive is 0: `torch.load` does not look at it, and ckptstore keeps
its own digests. A frame costs about 450 bytes, a third of what `torch.save` adds. The frame of a plain value has no
payload.
"""

from __future__ import annotations

import io
import pickletools
import struct
import sys
import zlib
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import Any

import torch

from ckptstore.errors import CheckpointDamaged, InvalidState

MAX_PAYLOAD_BYTES = (4 << 30) - (64 << 10)
"""The most bytes of a payload. Above this the archive would need the 64-bit form; plans cut tensors long before."""

_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4s4H2IH")
_JANUARY_1980 = 0x21
_VERSION = b"3\n"
_DEFLATED = 8
_SHORT_BYTES, _SAMPLE_BYTES = 4096, 64 << 10


@dataclass(slots=True)
class Template:
    """The bytes before and after the payload of every tensor of one dtype and shape."""

    header: bytes
    payload_bytes: int
    trailer: bytes
    size_bytes: int = field(init=False)
    """The size of the whole frame; computed once, since it is read with every tensor."""

    def __post_init__(self) -> None:
        self.size_bytes = len(self.header) + self.payload_bytes + len(self.trailer)


@lru_cache(maxsize=65_536)
def template(dtype: torch.dtype, sizes: tuple[int, ...]) -> Template:
    """Return the frame of a contiguous tensor. Cached; making one takes no memory for the payload."""
    payload_bytes = prod(sizes) * dtype.itemsize
    if payload_bytes > MAX_PAYLOAD_BYTES:
        raise InvalidState(f"one chunk of {payload_bytes} bytes does not fit a frame of {MAX_PAYLOAD_BYTES}")
    pickled = _pickle_of(dtype, sizes)
    header, directory = _entries(pickled, pickled)
    local, central = _entry(b"t/data/0", 0, (payload_bytes, payload_bytes), len(header))
    header, directory = header + local, directory + central
    return Template(header, payload_bytes, directory + _end(3, directory, len(header) + payload_bytes))


def value_frame(value: Any) -> bytes:
    """Return a plain value as `torch.save` writes it, for stock readers. ckptstore itself never reads it."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def pickle_frame(pickled: bytes) -> bytes:
    """Return the same frame for a value without objects of torch, from its pickle of protocol 2.

    Takes a few microseconds, where `torch.save` takes more than a hundred. Compress a long pickle if that makes it
    shorter by a quarter, since the value is in the checkpoint a second time. At most `MAX_PAYLOAD_BYTES`.
    """
    kept, sample = pickled, pickled[:_SAMPLE_BYTES]
    if len(pickled) > _SHORT_BYTES and len(_deflated(sample)) < len(sample) * 3 // 4:
        kept = _deflated(pickled)
    archive, directory = _entries(pickled, kept)
    return archive + directory + _end(2, directory, len(archive))


def _deflated(content: bytes) -> bytes:
    deflate = zlib.compressobj(1, wbits=-zlib.MAX_WBITS)
    return deflate.compress(content) + deflate.flush()


def _entries(pickled: bytes, kept: bytes) -> tuple[bytes, bytes]:
    """Return the entries of a pickle, of which `kept` is stored, and of the version, and their directory."""
    sizes, is_deflated = (len(kept), len(pickled)), kept is not pickled
    local, directory = _entry(b"t/data.pkl", zlib.crc32(pickled), sizes, 0, is_deflated=is_deflated)
    archive = local + kept
    sizes = (len(_VERSION), len(_VERSION))
    local, central = _entry(b"t/version", zlib.crc32(_VERSION), sizes, len(archive))
    return archive + local + _VERSION, directory + central


def _end(count: int, directory: bytes, offset: int) -> bytes:
    return _END.pack(b"PK\5\6", 0, 0, count, count, len(directory), offset, 0)


def _entry(
    name: bytes, crc32: int, sizes: tuple[int, int], offset: int, *, is_deflated: bool = False
) -> tuple[bytes, bytes]:
    """Return the local header and the directory entry of a file of the archive. `sizes` are its bytes in the archive,
    and those of its content."""
    shared = (0, _DEFLATED if is_deflated else 0, 0, _JANUARY_1980, crc32, *sizes, len(name), 0)
    local = _LOCAL.pack(b"PK\3\4", 20, *shared) + name
    central = _CENTRAL.pack(b"PK\1\2", 20, 20, *shared, 0, 0, 0, 0, offset) + name
    return local, central


class _Head:
    """A sink that keeps the first bytes and drops the rest, so that the payload of a huge tensor is never touched."""

    def __init__(self) -> None:
        self.kept = bytearray()

    def write(self, data: Any) -> int:
        size_bytes = len(data)
        if len(self.kept) < 1 << 16 and size_bytes < 1 << 16:
            self.kept += data
        return size_bytes

    def flush(self) -> None:
        pass


def _pickle_of(dtype: torch.dtype, sizes: tuple[int, ...]) -> bytes:
    """Return the pickle that torch writes for a plain CPU tensor, without unreferenced memo entries."""
    head: Any = _Head()
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(torch.empty(sizes, dtype=dtype, device="cpu"), head)
    finally:
        torch.serialization.set_crc32_options(before)
    name_bytes, extra_bytes = struct.unpack_from("<2H", head.kept, 26)
    start = _LOCAL.size + name_bytes + extra_bytes
    return pickletools.optimize(bytes(head.kept[start:]))


def payload_range(tail: bytes, frame_bytes: int, *, file: str) -> tuple[int, int, int]:
    """Return, from the last bytes of a frame, the offset of its payload's local header, the payload's size, and a flag.

    The flag is 1 when the frame has exactly one payload that is stored without compression and in the byte order of
    this machine, else 0. Raises CheckpointDamaged when the bytes are not the end of an archive.
    """
    try:
        entries = _directory(tail, frame_bytes, file=file)
    except struct.error as error:
        raise CheckpointDamaged(f"{file} has a torn archive directory: {error}", file=file) from None
    payloads = [entry for name, entry in entries if name.rpartition(b"data/")[2].isdigit()]
    if len(payloads) != 1:
        return 0, 0, 0
    offset, size_bytes, method = payloads[0]
    # An entry names the byte order, "little" or "big"; its size tells which.
    is_swapped = any(
        name.rpartition(b"/")[2] == b"byteorder" and size != len(sys.byteorder) for name, (_, size, _) in entries
    )
    return offset, size_bytes, int(method == 0 and not is_swapped)


def payload_offset(local_header: bytes, header_offset: int, *, file: str) -> int:
    """Return the offset at which the payload begins, from the first 30 bytes at its local header."""
    if len(local_header) < _LOCAL.size or local_header[:4] != b"PK\3\4":
        raise CheckpointDamaged(f"{file} has no archive entry at {header_offset} of a frame", file=file)
    name_bytes, extra_bytes = struct.unpack_from("<2H", local_header, 26)
    return header_offset + _LOCAL.size + int(name_bytes) + int(extra_bytes)


def _directory(tail: bytes, frame_bytes: int, *, file: str) -> list[tuple[bytes, tuple[int, int, int]]]:
    """Return (name, (offset, size, method)) of each entry of the archive."""
    end = tail.rfind(b"PK\5\6")
    if end < 0 or end + _END.size > len(tail):
        raise CheckpointDamaged(f"{file} has no archive where a tensor is expected", file=file)
    _, _, _, _, count, directory_bytes, start, _ = _END.unpack_from(tail, end)
    if 0xFFFFFFFF in (start, directory_bytes) or count == 0xFFFF:
        locator = tail.rfind(b"PK\6\6", 0, end)
        if locator < 0 or locator + 56 > len(tail):
            raise CheckpointDamaged(f"{file} has a torn archive directory", file=file)
        count, directory_bytes, start = struct.unpack_from("<3Q", tail, locator + 32)
    at = start - (frame_bytes - len(tail))
    if at < 0 or at + directory_bytes > len(tail):
        raise CheckpointDamaged(f"{file} has an archive directory that is out of bounds", file=file)
    found = []
    for _ in range(count):
        if at + _CENTRAL.size > len(tail) or tail[at : at + 4] != b"PK\1\2":
            raise CheckpointDamaged(f"{file} has a torn archive directory", file=file)
        fields = _CENTRAL.unpack_from(tail, at)
        method, size_bytes, name_bytes, extra_bytes, comment_bytes = fields[4], fields[9], *fields[10:13]
        name = tail[at + _CENTRAL.size :][:name_bytes]
        extra = tail[at + _CENTRAL.size + name_bytes :][:extra_bytes]
        found.append((name, (*_wide(fields[16], size_bytes, fields[8], extra), method)))
        at += _CENTRAL.size + name_bytes + extra_bytes + comment_bytes
    return found


def _wide(offset: int, size_bytes: int, stored_bytes: int, extra: bytes) -> tuple[int, int]:
    """Return offset and size of an entry, from the 64-bit field if the 32-bit ones are full."""
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, at)
        if kind == 1:
            numbers = iter(struct.unpack_from(f"<{length // 8}Q", extra, at + 4))
            size_bytes = next(numbers, size_bytes) if size_bytes == 0xFFFFFFFF else size_bytes
            _ = next(numbers, 0) if stored_bytes == 0xFFFFFFFF else 0
            offset = next(numbers, offset) if offset == 0xFFFFFFFF else offset
        at += 4 + length
    return offset, size_bytes
