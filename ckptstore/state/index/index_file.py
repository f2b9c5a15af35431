"""The file of the tensor index: the parts of all ranks, a directory of where each lies with its digest, and a footer.

So a rank can read the footer, the directory and its own part alone. Pure.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ckptstore.errors import CheckpointDamaged, UnsupportedVersion
from ckptstore.format.digest import STRUCTURES, Digest
from ckptstore.format.encoding import FORMAT_VERSION
from ckptstore.state.index.part import is_shared

INDEX_NAME = "tensors.index"
"""The name of the file; one for each checkpoint."""

_ENTRY = np.dtype([("offset", "<u8"), ("size_bytes", "<u8"), ("digest", "<u4"), ("is_shared", "<u4")])
_FOOTER = struct.Struct("<8s4I")
_FOOTER_MAGIC = b"CKPTTIXE"
FOOTER_BYTES = _FOOTER.size
ENTRY_BYTES = _ENTRY.itemsize
"""What the directory has for each part."""


def join_parts(parts: Sequence[bytes]) -> bytes:
    """The joined index: one part for each rank, in the order of ranks."""
    entries = np.zeros(len(parts), _ENTRY)
    sizes = [len(part) for part in parts]
    entries["offset"] = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    entries["size_bytes"], entries["is_shared"] = sizes, [is_shared(part) for part in parts]
    entries["digest"] = [_digest(part).value for part in parts]
    directory = entries.tobytes()
    footer = _FOOTER.pack(_FOOTER_MAGIC, FORMAT_VERSION, len(parts), _digest(directory).value, 0)
    return b"".join([*parts, directory, footer])


def _digest(data: bytes | memoryview) -> Digest:
    return Digest.of(data, algorithm=STRUCTURES)


class PartPlace(NamedTuple):
    """Where a rank's part lies in the joined index."""

    offset: int
    size_bytes: int
    digest: Digest
    is_shared: bool
    """Whether it has plain values that are for all ranks, or tensors that other ranks may have too."""


def directory_bytes(footer: bytes | memoryview, *, file: str = INDEX_NAME) -> int:
    """The size of the directory, which lies right before the footer, the last `FOOTER_BYTES` of the file."""
    if len(footer) != FOOTER_BYTES or bytes(footer[:8]) != _FOOTER_MAGIC:
        raise CheckpointDamaged(f"{file} has no footer", file=file)
    _, version, count, _, _ = _FOOTER.unpack(footer)
    if version > FORMAT_VERSION:
        raise UnsupportedVersion(f"{file} has version {version}", file=file, hint="Upgrade ckptstore to read it")
    return int(count) * ENTRY_BYTES


def places(directory: bytes | memoryview, footer: bytes | memoryview, size_bytes: int, *, file: str) -> list[PartPlace]:
    """Where each rank's part lies in an index of that size."""
    if len(directory) != directory_bytes(footer, file=file) or _digest(directory).value != _FOOTER.unpack(footer)[3]:
        raise CheckpointDamaged(f"{file} has a damaged directory", file=file)
    entries = np.frombuffer(directory, _ENTRY)
    ends = np.cumsum(entries["size_bytes"])
    starts = ends - entries["size_bytes"]
    total = int(ends[-1]) if len(ends) else 0
    if (entries["offset"] != starts).any() or total + len(directory) + FOOTER_BYTES != size_bytes:
        raise CheckpointDamaged(f"{file} has a directory that does not fit its parts", file=file)
    return [
        PartPlace(offset, size, Digest(STRUCTURES, digest), bool(shared))
        for offset, size, digest, shared in entries.tolist()
    ]


def split_parts(data: bytes | memoryview, *, file: str = INDEX_NAME) -> list[memoryview]:
    """The parts of a joined index that is in memory, each against its digest."""
    view = memoryview(data)
    footer = view[max(0, len(view) - FOOTER_BYTES) :]
    entries = directory_bytes(footer, file=file)
    directory = view[max(0, len(view) - FOOTER_BYTES - entries) : len(view) - FOOTER_BYTES]
    parts = []
    for rank, place in enumerate(places(directory, footer, len(view), file=file)):
        part = view[place.offset : place.offset + place.size_bytes]
        if _digest(part) != place.digest:
            raise CheckpointDamaged(f"{file} has a damaged part of rank {rank}", file=file)
        parts.append(part)
    return parts
