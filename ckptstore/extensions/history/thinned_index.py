"""The tensor index of a thinned checkpoint: without some keys, and with new places in the files that are written again.

Files whose items all stay, or that cannot be cut, stay as they are, with the digests of their blocks. Of a file that is
written again the frames of what stays are laid out anew. Pure, but for a function that reads a stretch of a file.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from ckptstore.errors import CheckpointDamaged, InvalidInput
from ckptstore.format.digest import ALGORITHMS, BLOCK_BYTES, Digest, unpacked
from ckptstore.runtime.near import meant, nearest_key
from ckptstore.state.index.outline import Outline, PartFile, Span, encode_table
from ckptstore.state.index.part import BESIDE_VALUE, DTYPE_NAMES, Part, PartBuilder
from ckptstore.state.index.tensor_index import TensorIndex
from ckptstore.state.live.values import references
from ckptstore.state.tensors.boxes import Box
from ckptstore.state.tensors.frames import template
from ckptstore.state.tensors.segments import StoredStretch
from ckptstore.state.write.shard_files import ALIGN_BYTES, ShardFile

ReadChecked = Callable[[str, int, int, Sequence[tuple[int, Digest]]], memoryview]
"""Reads a stretch of a file: name, offset, size, and the digests of its blocks in turn, each with its size."""


def dropped_keys(index: TensorIndex, patterns: Sequence[str]) -> frozenset[str]:
    """Return the keys of tensors and values that fit a pattern, and of the tensors that belong to such values. A dict
    all of whose tensors fit goes with them.

    Raises InvalidInput for a pattern that fits nothing, when nothing would be left, and for a tensor that a value needs
    which stays.
    """
    of_ranks = [index.own_values(part.rank) for part in index.parts]
    values = [pair for held in (index.common_values(), *of_ranks) for pair in held.items()]
    own = {key for key, tensor in index.tensors.items() if not tensor.beside_value}
    keys = own.union(key for key, _ in values)
    for pattern in patterns:
        if not any(fnmatchcase(key, pattern) for key in keys):
            raise InvalidInput(
                f"{pattern!r} fits no key of the checkpoint{meant(nearest_key(pattern, keys))}",
                hint="Keys are like optimizer.state.0.weight.exp_avg, and `*` stands for anything in them",
            )
    dropped = {key for key in keys if any(fnmatchcase(key, pattern) for pattern in patterns)}
    for key, value in values:  # a dict of tensors: who drops "optimizer.*" means it too
        if any(fnmatchcase(f"{key}.", pattern) for pattern in patterns) and dropped.issuperset(references(value)):
            dropped.add(key)
    if dropped == keys:
        raise InvalidInput("Every key of the checkpoint would be dropped", hint="Remove it, with `ckptstore rm`")
    inside = {name for key, value in values if key in dropped for name in references(value)}
    needed = {name: key for key, value in values if key not in dropped for name in references(value)}
    for name in sorted(dropped & needed.keys()):
        raise InvalidInput(f"{name} belongs to {needed[name]}, which no pattern drops", hint="Drop both, or neither")
    return frozenset(dropped | (inside - needed.keys()))


@dataclass(slots=True)
class CutFile(ShardFile):
    """A file that is written again, with the frames of what stays."""

    offsets: dict[int, int] = field(default_factory=dict)
    """The new offset of the payload of each chunk, by its place in its part."""
    expected: list[bytes | None] = field(default_factory=list)
    """The digests of each region's blocks, None for the slab, which is another one than before."""
    frames: dict[int, int] = field(default_factory=dict)
    """The new offset of each frame of a plain value, by its old one."""
    digests: Sequence[bytes] = ()
    """The digests of each region's blocks as they were written."""

    def written(self, digests: Sequence[bytes]) -> None:
        """Take in the digests of the written regions. Raises CheckpointDamaged if a payload is not what was saved."""
        for before, after in zip(self.expected, digests, strict=True):
            if before is not None and before != after:
                raise CheckpointDamaged(
                    f"{self.name} is damaged, and was not written again: a block is not what was saved",
                    file=self.name,
                    hint="Nothing has changed. `ckptstore verify` names what is damaged",
                )
        self.digests = digests


class _FileOfPart(NamedTuple):
    """The chunks of one file, by their places in the part."""

    name: str
    chunks: range
    left: list[int]
    """Those that stay."""


class PartThinner:
    """One rank's part without some keys."""

    def __init__(self, part: Part, dropped: Collection[str]) -> None:
        self.part = part
        owners = (name.rpartition("#")[0] or name for name in part.names)
        inner = (part.flags & BESIDE_VALUE).astype(bool).tolist()
        self.stays = np.array(
            [
                name not in dropped and not (is_inner and owner in dropped)
                for name, owner, is_inner in zip(part.names, owners, inner, strict=True)
            ],
            bool,
        )
        self._dropped = dropped

    @cached_property
    def files(self) -> list[_FileOfPart]:
        """The files of the part, in its order."""
        part, found = self.part, []
        bounds = np.searchsorted(part.chunk_file, np.arange(len(part.files) + 1)).tolist()
        for number, name in enumerate(part.files):
            chunks = range(bounds[number], bounds[number + 1])
            left = [chunk for chunk in chunks if self.stays[part.chunk_tensor[chunk]]]
            found.append(_FileOfPart(name, chunks, left))
        return found

    def new_file(self, file: _FileOfPart, read: ReadChecked, read_into: Callable[[int, memoryview], None]) -> CutFile:
        """Lay out the frames of what stays in a file: small ones in a slab, larger ones behind it, each aligned."""
        part, new = self.part, CutFile(file.name)
        at: dict[tuple[int, int], int] = {}
        slabs: dict[int, memoryview] = {}
        small = [chunk for chunk in file.left if part.chunk_bytes[chunk] < BLOCK_BYTES]
        for chunk in small:
            region, offset = int(part.chunk_region[chunk]), int(part.chunk_offset[chunk])
            if region not in slabs:
                slabs[region] = self._read_region(region, file.name, read)
            start = offset - int(part.regions.offset[region])
            place = offset, int(part.chunk_bytes[chunk])
            if place not in at:
                frame = self._frame(chunk)
                at[place] = new.size_bytes + len(frame.header)
                payload = slabs[region][start : start + frame.payload_bytes]
                for data in (frame.header, payload, frame.trailer):
                    new.add_bytes(data)
            new.offsets[chunk] = at[place]
        if small:
            new.slab_bytes = new.size_bytes
            new.regions.append((0, new.slab_bytes))
            new.expected.append(None)
        for chunk in file.left:
            offset, payload_bytes = int(part.chunk_offset[chunk]), int(part.chunk_bytes[chunk])
            if payload_bytes < BLOCK_BYTES:
                continue
            if (offset, payload_bytes) not in at:
                frame = self._frame(chunk)
                new.add_bytes(bytes(-(new.size_bytes + len(frame.header)) % ALIGN_BYTES) + frame.header)
                at[offset, payload_bytes] = new.size_bytes
                new.regions.append((new.size_bytes, payload_bytes))
                new.expected.append(self._digests(int(part.chunk_region[chunk])))
                new.add(StoredStretch(read_into, offset, payload_bytes))
                new.add_bytes(frame.trailer)
            new.offsets[chunk] = at[offset, payload_bytes]
        return new

    def _frame(self, chunk: int) -> Any:
        row = int(self.part.chunk_tensor[chunk])
        return template(getattr(torch, DTYPE_NAMES[self.part.dtype[row]]), self._box(chunk).sizes)

    def _box(self, chunk: int) -> Box:
        part = self.part
        dims, at = int(part.ndim[part.chunk_tensor[chunk]]), int(part.chunk_box[chunk])
        numbers = part.numbers[at : at + 2 * dims].tolist()
        return Box(tuple(numbers[:dims]), tuple(numbers[dims:]))

    def _digests(self, region: int) -> bytes:
        digest_bytes = ALGORITHMS[self.part.algorithm].size_bytes
        first = int(self.part.regions.first_block[region])
        count = -(-int(self.part.regions.size_bytes[region]) // BLOCK_BYTES)
        return bytes(self.part.digests[first * digest_bytes : (first + count) * digest_bytes])

    def _read_region(self, region: int, name: str, read: ReadChecked) -> memoryview:
        regions = self.part.regions
        offset, size_bytes = int(regions.offset[region]), int(regions.size_bytes[region])
        digests = unpacked(self.part.algorithm, self._digests(region))
        starts = range(0, size_bytes, BLOCK_BYTES)
        sizes = [min(BLOCK_BYTES, size_bytes - start) for start in starts]
        return read(name, offset, size_bytes, list(zip(sizes, digests, strict=True)))

    def encode(self, new_files: Mapping[str, CutFile]) -> bytes:
        """Return the part as bytes; `new_files` are those that were written again."""
        part, builder = self.part, PartBuilder(self.part.rank, algorithm=self.part.algorithm)
        rows: dict[int, int] = {}
        for row, (name, dims, at) in enumerate(
            zip(part.names, part.ndim.tolist(), part.shape_at.tolist(), strict=True)
        ):
            if self.stays[row]:
                shape = tuple(part.numbers[at + dims : at + 2 * dims].tolist())
                rows[row] = builder.add_tensor(name, DTYPE_NAMES[part.dtype[row]], shape, int(part.flags[row]))
        for file in self.files:
            if not file.left:
                continue
            new = new_files.get(file.name)
            if new is None:
                regions = sorted({int(part.chunk_region[chunk]) for chunk in file.left})
                builder.add_file(file.name, [self._digests(region) for region in regions])
                slabs = {part.chunk_region[chunk] for chunk in file.left if part.chunk_bytes[chunk] < BLOCK_BYTES}
                for region in sorted(map(int, slabs)):
                    builder.add_slab(int(part.regions.offset[region]), int(part.regions.size_bytes[region]))
            else:
                builder.add_file(file.name, new.digests)
                if new.slab_bytes:
                    builder.add_slab(0, new.slab_bytes)
            for chunk in file.left:
                offset = int(part.chunk_offset[chunk]) if new is None else new.offsets[chunk]
                builder.add_chunk(rows[int(part.chunk_tensor[chunk])], offset, self._box(chunk))
        return builder.encode(common=self._values(part.common), own=self._values(part.own))

    def _values(self, text: bytes) -> bytes:
        """Return the JSON object of plain values without those that are dropped."""
        if not text:
            return b""
        left = {key: value for key, value in json.loads(text).items() if key not in self._dropped}
        return json.dumps(left, separators=(",", ":")).encode() if left else b""


def thinned_outline(
    outline: Outline, parts: Sequence[bytes], thinners: Sequence[PartThinner], dropped: Collection[str]
) -> Outline:
    """Return the outline without the dropped keys, for the parts as they are now."""
    algorithm = thinners[0].part.algorithm
    tensors = [tensor for tensor in outline.tensors if tensor.key not in dropped]
    left = [place for place, tensor in enumerate(outline.tensors) if tensor.key not in dropped]
    spans = []
    for span in outline.spans:
        low, high = bisect_left(left, span.first), bisect_left(left, span.last + 1)
        if low < high:
            spans.append(Span(span.rank, low, high - 1))
    tied, firsts = dict[str, str](), dict[str, str]()
    for key, first in sorted(outline.tied.items()):
        if key in dropped:
            continue
        if first not in dropped:
            tied[key] = first
        elif first in firsts:
            tied[key] = firsts[first]
        else:
            firsts[first] = key  # the bytes have lost the key that they were under
    paths = outline.paths if outline.paths.is_known else None
    encoded = [Part.decode(part, rank=rank, file=f"the part of {rank}") for rank, part in enumerate(parts)]
    values = {key for part in encoded for text in (part.common, part.own) if text for key in json.loads(text)}
    left_keys = {*values, *tied, *(tensor.key for tensor in tensors)}

    def has_any(keys: Collection[str], module: str) -> bool:
        return any(key.startswith(f"{module}.") for key in keys)

    return replace(
        outline,
        parts=tuple(PartFile(len(part), Digest.of(part, algorithm=algorithm)) for part in parts),
        table=encode_table(
            tensors,
            outline.layouts,
            [it for it in outline.modules if has_any(left_keys, it.key) or not has_any(dropped, it.key)],
            paths,
        ),
        tied=tied,
        own={key: rank for key, rank in outline.own.items() if key not in dropped},
        common=tuple(rank for rank, part in enumerate(encoded) if part.common),
        spans=tuple(spans),
    )
