"""What makes a checkpoint of ours readable by stock DCP: `.metadata`, and plain values framed as DCP frames them."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from ckptstore.runtime.collector import collector_paused
from ckptstore.runtime.torch_private import storage_info_class
from ckptstore.state.index.stock_names import stock_names, stock_path
from ckptstore.state.index.tensor_index import TensorIndex
from ckptstore.state.live.flatten import FlatState, join_path, stock_leaves
from ckptstore.state.tensors.boxes import Box, Sizes
from ckptstore.state.tensors.frames import template, value_frame
from ckptstore.state.write.stock_pickle import MetadataPickle, StockPlace

MAX_CHUNKS = 200_000
"""With more chunks than this `.metadata` is written on request only: it takes stock readers gigabytes to read it."""

Paths = Mapping[str, tuple[str | int, ...]]


def stock_frames(flat: FlatState, keys: Iterable[str]) -> tuple[dict[str, bytes], dict[str, tuple[str | int, ...]]]:
    """The frames of these plain values, leaf by leaf as stock DCP flattens them, and the path of each leaf."""
    frames: dict[str, bytes] = {}
    paths: dict[str, tuple[str | int, ...]] = {}
    made: dict[bytes, bytes] = {}
    for key in keys:
        for path, leaf in stock_leaves(flat.values[key], flat.paths[key]):
            text = pickle.dumps(leaf)  # equal values are framed once; thousands of hyperparameters are
            if text not in made:
                made[text] = value_frame(leaf)
            frames[join_path(path)] = made[text]
            paths[join_path(path)] = path
    return frames, paths


@collector_paused()
def stock_metadata(index: TensorIndex, places: Mapping[str, StockPlace], paths: Paths) -> bytes:
    """`.metadata` as stock DCP writes it. Of a tensor that differs between ranks it has the lowest rank's."""
    metadata = MetadataPickle()
    names = stock_names({*index.tensors, *places})

    def named(key: str) -> tuple[str, tuple[str | int, ...]]:
        name = names.get(key, key)
        return name, stock_path(paths.get(key, (key,)), key, name)

    for fqn, dtype, shape, chunks in _stock_tensors(index):
        if fqn not in places:
            metadata.add_tensor(*named(fqn), dtype, shape, chunks)
    for key, place in places.items():
        metadata.add_value(*named(key), place)
    return metadata.encode()


def _stock_tensors(index: TensorIndex) -> Iterator[tuple[str, torch.dtype, Sizes, list[tuple[Box, StockPlace]]]]:
    """Key, dtype, shape, and the box and frame of each chunk of the tensors of an index."""
    for fqn, entry in index.tensors.items():
        if entry.beside_value:
            continue
        dtype = getattr(torch, entry.dtype)
        chunks = []
        for chunk in index.chunks(fqn, index.ranks_of(fqn)[0] if entry.per_rank else 0):
            frame = template(dtype, chunk.box.sizes)
            place = index.files[chunk.file], chunk.offset - len(frame.header), frame.size_bytes
            chunks.append((chunk.box, place))
        yield fqn, dtype, entry.shape, chunks


def add_stock_tensors(index: TensorIndex, items: dict[str, Any], storage: dict[MetadataIndex, Any]) -> None:
    """Put the tensors of an index into the two dicts of a `Metadata`; chunks of entries that are there are replaced."""
    lies_at, size = storage_info_class(), lru_cache(None)(torch.Size)  # equal parts are pickled once
    properties = lru_cache(None)(TensorProperties)
    for fqn, dtype, shape, placed in _stock_tensors(index):
        chunks = []
        for number, (box, place) in enumerate(placed):
            offsets = size(box.offsets)
            chunks.append(ChunkStorageMetadata(offsets, size(box.sizes)))
            storage[MetadataIndex(fqn, offsets, number)] = lies_at(*place)
        if fqn in items:
            items[fqn].chunks = chunks
        else:
            items[fqn] = TensorStorageMetadata(properties(dtype), size(shape), chunks)


def add_stock_bytes(places: Mapping[str, StockPlace], items: dict[str, Any], storage: dict[MetadataIndex, Any]) -> None:
    """Put plain values, which lie at these places, into the two dicts of a `Metadata`."""
    lies_at = storage_info_class()
    for key, place in places.items():
        items[key] = BytesStorageMetadata()
        storage[MetadataIndex(key)] = lies_at(*place)
