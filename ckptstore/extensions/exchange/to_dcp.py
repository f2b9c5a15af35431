"""Export a directory of stock DCP, for a part of a state or one whose stored form stock DCP cannot read."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import groupby
from pathlib import Path
from typing import IO, Any

import torch

from ckptstore.extensions.exchange.selection import Selection
from ckptstore.extensions.exchange.streaming import close_off, stream_tensors
from ckptstore.format.digest import BLOCK_BYTES
from ckptstore.format.layout import DCP_METADATA_NAME
from ckptstore.state.index.key_paths import untyped
from ckptstore.state.index.part import Part, PartBuilder
from ckptstore.state.index.tensor_index import TensorIndex
from ckptstore.state.live.flatten import (
    FlatState,
    find_tensors,
    join_path,
    map_tensors,
    references_in,
    stock_leaves,
)
from ckptstore.state.read.stored import StoredState
from ckptstore.state.tensors.boxes import Box, whole
from ckptstore.state.tensors.frames import template
from ckptstore.state.write.assignment import chunks_of
from ckptstore.stock.stock_write import stock_frames, stock_metadata

FILE_NAME = "__0_0.distcp"


def write_dcp(stored: StoredState, selection: Selection, directory: Path, *, durable: bool) -> tuple[list[str], int]:
    """Write one data file and `.metadata`; return their names and the bytes of all tensors.

    Raises CheckpointDamaged.
    """
    names: dict[str, list[str]] = {}
    for key, source in selection.sources.items():
        names.setdefault(source, []).append(selection.name_of(key))
    known = {selection.name_of(key): untyped(selection.path_of(key)) for key in selection.sources}
    values, leaf_paths = _value_frames(stored, selection)
    places: dict[str, Any] = {}
    with (directory / FILE_NAME).open("xb") as file:
        chunks = _write_tensors(stored, list(names), file)
        for key, frame in values.items():
            places[key] = FILE_NAME, file.tell(), len(frame)
            file.write(frame)
        close_off(file, durable=durable)
    index = _index(stored, names, chunks)

    def is_meant(optimizer: str, _: Collection[str]) -> bool:
        """Return True unless it was saved as a plain value, or in one."""
        keys = {optimizer, f"{selection.strip_prefix}{optimizer}"}
        return not any(key == name or key.startswith(f"{name}.") for key in keys for name in selection.values)

    with (directory / DCP_METADATA_NAME).open("xb") as file:
        file.write(stock_metadata(index, places, {**known, **leaf_paths}, is_meant))
        close_off(file, durable=durable)
    return [FILE_NAME, DCP_METADATA_NAME], sum(size_bytes for _, _, size_bytes, _ in chunks)


_Chunk = tuple[str, int, int, Box]
"""A tensor's key, the offset and the size of a payload, and its box."""


def _write_tensors(stored: StoredState, keys: list[str], file: IO[bytes]) -> list[_Chunk]:
    chunks: list[_Chunk] = []
    for key, pieces in groupby(stream_tensors(stored, keys), key=lambda piece: piece[0]):
        entry = stored.entry(key)
        dtype = entry.torch_dtype
        stream = (data for _, data in pieces)
        rest = memoryview(b"")
        for box in chunks_of(whole(entry.shape), dtype.itemsize):
            frame = template(dtype, box.sizes)
            file.write(frame.header)
            chunks.append((key, file.tell(), frame.payload_bytes, box))
            left_bytes = frame.payload_bytes
            while left_bytes:
                rest = rest or next(stream)
                data, rest = rest[:left_bytes], rest[left_bytes:]
                left_bytes -= file.write(data)
            file.write(frame.trailer)
        assert not rest
        assert not any(len(data) for data in stream)  # a tensor without elements comes as one empty piece
    return chunks


def _value_frames(
    stored: StoredState, selection: Selection
) -> tuple[dict[str, bytes], dict[str, tuple[str | int, ...]]]:
    """Return the plain values in stock frames, leaf by leaf, and their paths. Tensors in tuples stay in their leaf."""
    flat = FlatState()
    tensors = {
        # memory that is never touched, but for tuples
        key: torch.empty(entry.shape, dtype=entry.torch_dtype, device="cpu")
        for value in selection.values.values()
        for key in references_in(value)
        for entry in [stored.entry(key)]
    }
    needed: dict[str, tuple[torch.Tensor, str]] = {}
    key_of = {id(tensor): key for key, tensor in tensors.items()}
    for key, value in selection.values.items():
        path = untyped(selection.path_of(key))
        name = join_path(path)
        flat.values[name] = map_tensors(value, path, lambda _key, reference: tensors[reference.key])
        flat.paths[name] = path
        for _, leaf in stock_leaves(flat.values[name], path):
            found = [tensor for _, tensor in find_tensors(leaf, path) if isinstance(tensor, torch.Tensor)]
            needed.update((key_of[id(tensor)], (tensor, key_of[id(tensor)])) for tensor in found)
    stored.fill(needed)
    return stock_frames(flat, flat.values)


def _index(stored: StoredState, names: Mapping[str, list[str]], chunks: list[_Chunk]) -> TensorIndex:
    """Build the index for `.metadata`. It is not stored, and has no digests."""
    builder = PartBuilder(0)
    sizes = [size_bytes for _, _, size_bytes, _ in chunks]
    builder.add_file(FILE_NAME, [bytes(4 * -(-size_bytes // BLOCK_BYTES)) for size_bytes in sizes])
    rows = {}
    for source, group in names.items():
        entry = stored.entry(source)
        rows[source] = [builder.add_tensor(name, entry.dtype, entry.shape) for name in group]
    for key, offset, size_bytes, box in chunks:
        if size_bytes < BLOCK_BYTES:
            builder.add_slab(offset, size_bytes)
        for row in rows[key]:
            builder.add_chunk(row, offset, box)
    return TensorIndex([Part.decode(builder.encode(), rank=0, file=DCP_METADATA_NAME)])
