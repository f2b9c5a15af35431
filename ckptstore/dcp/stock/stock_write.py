"""The parts that make a checkpoint of ours readable by stock DCP: `.metadata`, and plain values framed as DCP does
it."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice

import torch

from ckptstore.dcp.stock.stock_names import stock_names, stock_path
from ckptstore.dcp.stock.stock_pickle import MetadataPickle, StockPlace
from ckptstore.runtime.collector import collector_paused
from ckptstore.state.index.tensor_index import TensorIndex
from ckptstore.state.live.flatten import FlatState, join_path, stock_leaves
from ckptstore.state.tensors.boxes import Box, Sizes
from ckptstore.state.tensors.frames import MAX_PAYLOAD_BYTES, pickle_frame, template, value_frame

MAX_CHUNKS = 200_000
"""The most chunks and values for which `.metadata` is written without a request: it takes stock readers gigabytes to
read it."""
MAX_NESTED_VALUES = 10_000
"""The same for the values of dicts and lists, into which stock DCP takes them apart. Each of them takes some 600 bytes
for stock readers alone."""

_OF_TORCH = b"ctorch"
"""The bytes before the name of a function of torch in a pickle. Without any, `torch.save` makes the same pickle."""

Paths = Mapping[str, tuple[str | int, ...]]


def has_many_values(flat: FlatState, keys: Iterable[str]) -> bool:
    """Return True if stock DCP would take the dicts and lists of these plain values apart into more than
    `MAX_NESTED_VALUES`, or if there are more than `MAX_CHUNKS` values. Stop counting there."""
    nested = 0
    for count, key in enumerate(keys, 1):
        value = flat.values[key]
        if isinstance(value, Mapping | list):
            nested += sum(1 for _ in islice(stock_leaves(value, flat.paths[key]), MAX_NESTED_VALUES + 1 - nested))
        if nested > MAX_NESTED_VALUES or count + nested > MAX_CHUNKS:
            return True
    return False


def stock_frames(flat: FlatState, keys: Iterable[str]) -> tuple[dict[str, bytes], dict[str, tuple[str | int, ...]]]:
    """Return the frames of these plain values, leaf by leaf as stock DCP flattens them, and the path of each leaf."""
    frames: dict[str, bytes] = {}
    paths: dict[str, tuple[str | int, ...]] = {}
    made: dict[bytes, bytes] = {}
    for key in keys:
        for path, leaf in stock_leaves(flat.values[key], flat.paths[key]):
            text = pickle.dumps(leaf, 2)  # equal values are framed once; thousands of hyperparameters are
            if text not in made:
                has_no_tensor = _OF_TORCH not in text and len(text) < MAX_PAYLOAD_BYTES
                made[text] = pickle_frame(text) if has_no_tensor else value_frame(leaf)
            frames[join_path(path)] = made[text]
            paths[join_path(path)] = path
    return frames, paths


@collector_paused()
def stock_metadata(index: TensorIndex, places: Mapping[str, StockPlace], paths: Paths) -> bytes:
    """Return `.metadata` as stock DCP writes it. For a tensor that differs between ranks it has the lowest rank's."""
    metadata = MetadataPickle()
    names = stock_names({*index.tensors, *places})

    def named(key: str) -> tuple[str, tuple[str | int, ...]]:
        name = names.get(key, key)
        return name, stock_path(paths.get(key, (key,)), key, name)

    for fqn, dtype, shape, chunks in stock_tensors(index):
        if fqn not in places:
            metadata.add_tensor(*named(fqn), dtype, shape, chunks)
    for key, place in places.items():
        metadata.add_value(*named(key), place)
    return metadata.encode()


def stock_tensors(index: TensorIndex) -> Iterator[tuple[str, torch.dtype, Sizes, list[tuple[Box, StockPlace]]]]:
    """Yield key, dtype, shape, and the box and frame of each chunk of the tensors of an index."""
    for fqn, entry in index.tensors.items():
        if entry.beside_value:
            continue
        dtype = entry.torch_dtype
        chunks = []
        for chunk in index.chunks(fqn, index.ranks_of(fqn)[0] if entry.per_rank else 0):
            frame = template(dtype, chunk.box.sizes)
            place = index.files[chunk.file], chunk.offset - len(frame.header), frame.size_bytes
            chunks.append((chunk.box, place))
        yield fqn, dtype, entry.shape, chunks
