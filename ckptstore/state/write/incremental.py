"""Incremental saves: files of the checkpoint before are taken over whole while most of their bytes are still current.

A chunk is unchanged when its fingerprint is that of the same box of the same tensor in the checkpoint before. A file
most of whose bytes are unchanged chunks is linked, or copied inside the storage, and the rest of it is no longer
referred to; everything else is written into new files. So the checkpoint stays whole, and stock readers need nothing
new.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ckptstore.errors import CheckpointDamaged
from ckptstore.format.encoding import FORMAT_VERSION, as_list, as_number, as_text, load_object, shortened
from ckptstore.format.manifest import Receipt
from ckptstore.state.tensors.boxes import Box

LEAST_CURRENT = 0.75
"""The least share of a file that is still current for it to be taken over; below, the current chunks are written
again."""

Place = tuple[str, Box]
"""A tensor's key and a box of it."""


class KeptChunk(NamedTuple):
    """A frame in a file that may be taken over."""

    key: str
    box: Box
    offset: int
    """The offset of the payload."""
    size_bytes: int
    digest: str
    """Fingerprint of the payload with dtype and shape, hexadecimal."""
    block_digests: bytes
    """The digests of a payload that is a separate region; empty in a slab."""


class KeptFile(NamedTuple):
    """A file of the checkpoint before."""

    receipt: Receipt
    """The receipt, with the directory that holds the file. The algorithm of its digest is that of the blocks too."""
    slab_bytes: int
    slab_digests: bytes
    chunks: tuple[KeptChunk, ...]

    @property
    def region_digests(self) -> list[bytes]:
        """The digests of the regions that are referred to, in their order."""
        slab = [self.slab_digests] if self.slab_bytes else []
        return [*slab, *(chunk.block_digests for chunk in self.chunks if chunk.block_digests)]


@dataclass(frozen=True, slots=True)
class Kept:
    """The files of one rank in the checkpoint before."""

    attempt: str
    """The directory of that checkpoint."""
    files: tuple[KeptFile, ...]

    def still_good(self, digests: Mapping[Place, str], *, algorithm: str) -> list[KeptFile]:
        """Return the files to take over, with the chunks that are still current; no chunk is in two of them. All
        digests of an index are by one algorithm."""
        found, taken = [], set[Place]()
        for file in self.files:
            chunks = tuple(chunk for chunk in file.chunks if digests.get((chunk.key, chunk.box)) == chunk.digest)
            places = {(chunk.key, chunk.box) for chunk in chunks}
            is_alike = file.receipt.digest is not None and file.receipt.digest.algorithm == algorithm
            current_bytes = sum(chunk.size_bytes for chunk in chunks)
            is_worth_it = current_bytes >= LEAST_CURRENT * file.receipt.size_bytes > 0
            if is_alike and is_worth_it and taken.isdisjoint(places):
                found.append(file._replace(chunks=chunks))
                taken |= places
        return found

    def encode(self) -> bytes:
        """Return the files as JSON, for the next start of the job (format-v1, "Digests of chunks")."""
        files = [
            {
                **file.receipt.to_json(),
                "slab_bytes": file.slab_bytes,
                "slab_digests": base64.b64encode(file.slab_digests).decode(),
                "chunks": [
                    [c.key, *c.box, c.offset, c.size_bytes, c.digest, base64.b64encode(c.block_digests).decode()]
                    for c in file.chunks
                ],
            }
            for file in self.files
        ]
        return json.dumps({"version": FORMAT_VERSION, "files": files}).encode()

    def only_in(self, attempts: Collection[str]) -> Kept:
        """Return the files that lie in one of these directories."""
        return Kept(self.attempt, tuple(file for file in self.files if file.receipt.attempt in attempts))

    @staticmethod
    def decode(data: bytes, *, attempt: str, file: str) -> Kept:
        """Read the output of `encode`. Raises CheckpointDamaged."""
        value = load_object(data, file=file)
        try:
            return Kept(attempt, tuple(_file_from_json(entry) for entry in as_list(value["files"])))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointDamaged(f"{file} does not describe chunks: {shortened(repr(error))}", file=file) from None


def _file_from_json(entry: dict[str, Any]) -> KeptFile:
    receipt = Receipt.from_json(entry)
    if receipt.attempt is None or receipt.digest is None:
        raise ValueError("a file has no directory or no digest")
    return KeptFile(
        receipt,
        _number(entry["slab_bytes"]),
        _bytes(entry["slab_digests"]),
        tuple(
            KeptChunk(
                as_text(key),
                Box(tuple(map(_number, as_list(offsets))), tuple(map(_number, as_list(sizes)))),
                _number(at),
                _number(size_bytes),
                as_text(digest),
                _bytes(blocks),
            )
            for key, offsets, sizes, at, size_bytes, digest, blocks in as_list(entry["chunks"])
        ),
    )


def _number(value: Any) -> int:
    return as_number(value, 0, 1 << 63)


def _bytes(value: Any) -> bytes:
    return base64.b64decode(as_text(value), validate=True)


def kept_file_name(rank: int) -> str:
    """Return the file that stores a rank's `Kept`; it is listed in the manifest like any other."""
    return f"digests-rank={rank:05d}.json"
