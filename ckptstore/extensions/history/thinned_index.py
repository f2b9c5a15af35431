"""The index of a thinned checkpoint, and its `.metadata` for stock readers: those of the whole one without some keys.

Nothing in them moves, because the files that are left are whole files of that checkpoint. Pure.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import accumulate

import numpy as np

from ckptstore.errors import InvalidInput
from ckptstore.format.digest import ALGORITHMS, BLOCK_BYTES, Digest
from ckptstore.state.index.outline import INDEX_NAME, Outline, PartFile, Span, encode_table
from ckptstore.state.index.part import DTYPE_NAMES, Part, PartBuilder
from ckptstore.state.index.tensor_index import TensorIndex
from ckptstore.state.live.patterns import check_used
from ckptstore.state.live.values import references
from ckptstore.state.tensors.boxes import Box
from ckptstore.stock.stock_pickle import MetadataPickle, StockPlace
from ckptstore.stock.stock_pickles import load_metadata
from ckptstore.stock.stock_write import stock_names, stock_tensors


def divided_keys(index: TensorIndex, patterns: Sequence[str]) -> tuple[frozenset[str], frozenset[str]]:
    """Return the keys of tensors and values that fit a pattern, and the others. A dict all of whose tensors fit goes
    with them, and so do the tensors that belong to a value.

    Raises InvalidInput for a pattern that fits nothing, when nothing would be left, and for a tensor that a value needs
    which stays.
    """
    of_ranks = [index.own_values(part.rank) for part in index.parts]
    values = [pair for held in (index.common_values(), *of_ranks) for pair in held.items()]
    own = {key for key, tensor in index.tensors.items() if not tensor.beside_value}
    keys = own.union(key for key, _ in values)
    check_used(patterns, keys, name="drop")
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
    dropped |= inside - needed.keys()
    return frozenset(dropped), frozenset(keys - dropped)


def files_left(index: TensorIndex, dropped: Collection[str], frames: Iterable[StockPlace], *, step: int) -> set[str]:
    """Return the files with something that stays: tensors, or these frames of plain values.

    Raises InvalidInput for a file that holds bytes of dropped tensors too.
    """
    left, gone = defaultdict[str, set[int]](set), defaultdict[str, set[int]](set)
    for file, offset, _ in frames:
        left[file].add(offset)
    for part in index.parts:
        columns = (part.chunk_file.tolist(), part.chunk_tensor.tolist(), part.chunk_offset.tolist())
        for number, row, offset in zip(*columns, strict=True):
            (gone if part.names[row] in dropped else left)[part.files[number]].add(offset)
    for name in sorted(left.keys() & gone.keys()):
        if not gone[name] <= left[name]:  # tied tensors share a place
            raise InvalidInput(
                f"Step {step} was not thinned: {name} holds keys that stay beside keys that would go",
                step=step,
                file=name,
                hint="Save with KeepWeights in the retention, whose `drop` names what goes: that is kept in files of "
                "its own. Or `export` what you need of this one",
            )
    return {*left}


def left_index(
    index: TensorIndex, outline: Outline, dropped: Collection[str], left: Collection[str]
) -> tuple[TensorIndex, dict[str, tuple[bytes, int]]]:
    """Return the index without the dropped keys, and its files, each of a rank; `left` are the other keys."""
    encoded = [_left_part(part, dropped) for part in index.parts]
    parts = [Part.decode(data, rank=rank, file=outline.place(rank)[0]) for rank, data in enumerate(encoded)]
    tied, heirs = dict[str, str](), dict[str, str]()
    for key, first in sorted(outline.tied.items()):
        if key in left:
            heir = first if first in left else heirs.setdefault(first, key)
            tied |= {} if heir == key else {key: heir}
    places = [place for place, tensor in enumerate(outline.tensors) if tensor.key in left]
    found = [(rank, bisect_left(places, first), bisect_left(places, last + 1)) for rank, first, last in outline.spans]
    for first, heir in heirs.items():  # whoever has stored the first has stored its heir
        place, at = outline.places[first], bisect_left(places, outline.places[heir])
        found += [(span.rank, at, at + 1) for span in outline.spans if span.first <= place <= span.last]

    def has_any(keys: Collection[str], module: str) -> bool:
        return any(key.startswith(f"{module}.") for key in keys)

    table = encode_table(
        [outline.tensors[place] for place in places],
        outline.layouts,
        [it for it in outline.modules if has_any(left, it.key) or not has_any(dropped, it.key)],
        outline.paths if outline.paths.is_known else None,
    )
    thinned = replace(
        outline,
        parts=tuple(PartFile(len(data), Digest.of(data, algorithm=parts[0].algorithm)) for data in encoded),
        table=table,
        tied=tied,
        own={key: rank for key, rank in outline.own.items() if key in left},
        common=tuple(part.rank for part in parts if part.common),
        spans=tuple(Span(rank, low, high - 1) for rank, low, high in found if low < high),
    )
    files = {thinned.place(rank)[0]: (data, rank) for rank, data in enumerate(encoded)}
    files[INDEX_NAME] = thinned.encode() + b"".join(encoded if thinned.is_packed else ()), 0
    return TensorIndex(parts, thinned), files


def _left_part(part: Part, dropped: Collection[str]) -> bytes:
    """Return the part without the dropped keys. Files that have anything else keep all their regions."""
    builder, rows = PartBuilder(part.rank, algorithm=part.algorithm), dict[int, int]()

    def numbers(at: int, row: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        dims = int(part.ndim[row])
        found = tuple(part.numbers[at : at + 2 * dims].tolist())
        return found[:dims], found[dims:]

    for row, name in enumerate(part.names):
        if name not in dropped:
            _, shape = numbers(int(part.shape_at[row]), row)
            rows[row] = builder.add_tensor(name, DTYPE_NAMES[part.dtype[row]], shape, int(part.flags[row]))
    regions, digest_bytes = part.regions, ALGORITHMS[part.algorithm].size_bytes
    bounds = [*(regions.first_block * digest_bytes).tolist(), len(part.digests)]
    is_large, stays = part.chunk_bytes >= BLOCK_BYTES, np.isin(part.chunk_tensor, [*rows])
    for number, name in enumerate(part.files):
        here = part.chunk_file == number
        left = np.flatnonzero(here & stays).tolist()
        if left:
            first, last = np.searchsorted(regions.file, [number, number + 1]).tolist()
            builder.add_file(name, [bytes(part.digests[bounds[first] : bounds[last]])])
            for region in sorted({*range(first, last)} - {*part.chunk_region[here & is_large].tolist()}):
                builder.add_slab(int(regions.offset[region]), int(regions.size_bytes[region]))
        for chunk in left:
            row = int(part.chunk_tensor[chunk])
            box = Box(*numbers(int(part.chunk_box[chunk]), row))
            builder.add_chunk(rows[row], int(part.chunk_offset[chunk]), box)

    def values(text: bytes) -> bytes:
        found = {key: value for key, value in json.loads(text or b"{}").items() if key not in dropped}
        return json.dumps(found, separators=(",", ":")).encode() if found else b""

    return builder.encode(common=values(part.common), own=values(part.own))


class StockLeft:
    """The part of a `.metadata` that stays."""

    def __init__(self, data: bytes, index: TensorIndex, dropped: Collection[str], left: Collection[str]) -> None:
        """Read the one of a whole checkpoint with this index. Raises CheckpointDamaged."""
        metadata = load_metadata(data)
        known, paths = metadata.state_dict_metadata, metadata.planner_data
        self._names = stock_names(
            {*index.tensors, *dropped, *left}, lambda _, names: not known.keys().isdisjoint(names)
        )
        self._paths = paths if isinstance(paths, dict) else {}
        gone = {name for key in dropped for name in (key, self._names.get(key, key))}
        self.frames: dict[str, StockPlace] = {
            item.fqn: (str(place.relative_path), int(place.offset), int(place.length))
            for item, place in metadata.storage_data.items()
            if not hasattr(known.get(item.fqn), "chunks")
            and gone.isdisjoint(accumulate(item.fqn.split("."), "{}.{}".format))
        }
        """The places of plain values."""

    def encode(self, index: TensorIndex) -> bytes:
        """Return the `.metadata` for the index of the thinned checkpoint."""
        made = MetadataPickle()
        for key, dtype, shape, chunks in stock_tensors(index):
            name = self._names.get(key, key)
            if name not in self.frames:
                made.add_tensor(name, tuple(self._paths.get(name, (name,))), dtype, shape, chunks)
        for name, place in self.frames.items():
            made.add_value(name, tuple(self._paths.get(name, (name,))), place)
        return made.encode()
