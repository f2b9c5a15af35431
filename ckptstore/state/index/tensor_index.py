"""The tensor index of a checkpoint: the parts of ranks, joined. Pure.

`TensorIndex` answers which chunks of which file hold a tensor.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np

from ckptstore.errors import CheckpointDamaged
from ckptstore.format.digest import BLOCK_BYTES, Digest, fingerprinter, unpacked
from ckptstore.format.encoding import as_object, parse_json
from ckptstore.runtime.collector import collector_paused
from ckptstore.state.index.outline import Outline
from ckptstore.state.index.part import DTYPE_NAMES, PER_RANK, Part, Regions, Tensor
from ckptstore.state.tensors.boxes import Box, Sizes, overlap, whole
from ckptstore.state.tensors.layouts import distinct


class Chunk(NamedTuple):
    """A box of a tensor, in a file."""

    file: int
    offset: int
    """The offset of the payload in the file."""
    box: Box
    region: int


class TensorIndex:
    """The parts of all ranks, or of some."""

    @collector_paused()
    def __init__(self, parts: Iterable[Part], outline: Outline | None = None) -> None:
        """Join the parts. `outline` has the tensors of all ranks; without one, the parts are those of all ranks.

        Raises CheckpointDamaged if parts disagree with each other or with the outline.
        """
        self.parts = tuple(parts)
        self.outline = outline
        self.world_size = len(self.parts) if outline is None else outline.world_size
        self.is_whole = len(self.parts) == self.world_size
        self.files: tuple[str, ...] = tuple(dict.fromkeys(name for part in self.parts for name in part.files))
        self._row_of: dict[tuple[str, int], int] = {}
        self._entries: list[Tensor] = []
        self._entry_ranks: list[int] = []
        self._boxes: dict[tuple[int, int], Box] = {}
        if outline is not None:
            self._take(outline)
        rows_of_parts = self._merge_rows()
        self._join_columns(rows_of_parts)
        if outline is not None and self.is_whole:
            self._compare(outline, rows_of_parts)

    def _take(self, outline: Outline) -> None:
        """Take in the tensors of an outline."""
        own = outline.own
        ranks = [own.get(tensor.key, -1) for tensor in outline.tensors] if own else repeat(-1)
        keys = [tensor.key for tensor in outline.tensors]
        self._row_of = dict(zip(zip(keys, ranks, strict=False), range(len(keys)), strict=True))  # `repeat` has no end
        self._entries = [*outline.tensors]
        self._entry_ranks = [-1] * len(keys)

    def _compare(self, outline: Outline, rows_of_parts: list[np.ndarray[Any, Any]]) -> None:
        """Raise CheckpointDamaged for a tensor or a tie of the outline that the parts of all ranks do not have."""
        is_held = np.zeros(len(self._entries), bool)
        for rows in rows_of_parts:
            is_held[rows] = True
        for row in np.flatnonzero(~is_held).tolist():
            raise CheckpointDamaged(f"the outline has the tensor {self._entries[row].key}, which no rank has")
        for key, first in outline.tied.items():
            if any(self.chunks(key, rank) != self.chunks(first, rank) for rank in self.ranks_of(key) or [0]):
                raise CheckpointDamaged(f"the outline ties {key} to {first}, and it lies in another place")

    def lacking(self, fqn: str, rank: int, wanted: Box) -> frozenset[int]:
        """Return the ranks whose parts may have chunks of a box, as that rank sees the tensor, and were not read; none
        if the parts that were read have all of the box."""
        if self.outline is None or self.is_whole:
            return frozenset()
        found = self.outline.holders(fqn, rank, wanted) - self._ranks
        if found and (row := self._row_at(fqn, rank)) is not None:
            common = (overlap(chunk.box, wanted) for chunk in self._chunks(row, wanted))
            if sum(box.volume for box in common if box is not None) == wanted.volume:
                return frozenset()
        return found

    @cached_property
    def _ranks(self) -> frozenset[int]:
        return frozenset(part.rank for part in self.parts)

    def _merge_rows(self) -> list[np.ndarray[Any, Any]]:
        """Return the rows of each part's tensors: one for a tensor, or one for each rank that has it if it differs
        between ranks."""
        known: dict[tuple[int, bytes, bytes, bytes], np.ndarray[Any, Any]] = {}
        found = []
        for part in self.parts:
            key = (id(part.names), part.dtype.tobytes(), part.flags.tobytes(), _shapes(part))
            rows = known.get(key)
            if rows is None:
                rows = self._rows_of(part)
            if not (part.flags & PER_RANK).any():
                known[key] = rows
            found.append(rows)
        return found

    def _rows_of(self, part: Part) -> np.ndarray[Any, Any]:
        """Return the row of each tensor of a part."""
        entries = _entries_of(part)
        if not part.flags.any():  # most tensors are known, and as they are known: one look at all of them
            rows = [self._row_of.get((name, -1), -1) for name in part.names]
            if -1 not in rows and [self._entries[row][:4] for row in rows] == [entry[:4] for entry in entries]:
                return np.array(rows, np.int64)
        return np.array([self._row(part.rank, entry) for entry in entries], np.int64)

    def _row(self, rank: int, entry: Tensor) -> int:
        known = self._row_of.setdefault((entry.key, rank if entry.per_rank else -1), len(self._entries))
        if known == len(self._entries):
            outline = self.outline
            if outline and not entry.beside_value and not (entry.per_rank and entry.key in outline.own):
                raise CheckpointDamaged(f"the outline has no tensor {entry.key} as rank {rank} has it")
            if outline and not entry.beside_value:
                entry = entry._replace(live=outline.live.get(entry.key, ""))
            self._entries.append(entry)
            self._entry_ranks.append(rank)
        elif self._entries[known][:4] != entry[:4]:  # only an outline has layouts
            other = self._entry_ranks[known]
            both = f"the outline and rank {rank}" if other < 0 else f"ranks {other} and {rank}"
            raise CheckpointDamaged(f"{both} disagree on the tensor {entry.key}")
        return known

    def _join_columns(self, rows_of_parts: list[np.ndarray[Any, Any]]) -> None:
        number_of = {name: number for number, name in enumerate(self.files)}
        files, numbers, chunks, regions, first_regions, region_base = [], [], [], [], list[int](), 0
        number_base = 0
        for part, rows in zip(self.parts, rows_of_parts, strict=True):
            file_numbers = np.array([number_of[name] for name in part.files] or [0], np.int64)
            chunk_rows = rows[part.chunk_tensor] if len(rows) else np.zeros(0, np.int64)
            columns = (chunk_rows, file_numbers[part.chunk_file], part.chunk_offset)
            places = (part.chunk_box.astype(np.int64) + number_base, part.chunk_region + region_base)
            chunks.append((*columns, *places, part.chunk_bytes))
            numbers.append(part.numbers.astype(np.int64))
            held = part.regions
            regions.append((file_numbers[held.file], held.offset, held.size_bytes, held.first_block))
            first_regions.append(region_base)
            files.append(len(part.files))
            region_base += len(held.offset)
            number_base += len(part.numbers)
        self._numbers = _joined(numbers)
        row, file, offset, box, region, size = (_joined([columns[i] for columns in chunks]) for i in range(6))
        order = np.argsort(row, kind="stable")
        self._file, self._offset, self._box, self._region = file[order], offset[order], box[order], region[order]
        self._bounds = np.searchsorted(row[order], np.arange(len(self._entries) + 1))
        self._stored_bytes = np.bincount(row[order], size[order], len(self._entries)).astype(np.int64)
        self._limits: list[int] = self._bounds.tolist()
        self.regions = Regions(*(_joined([columns[i] for columns in regions]) for i in range(4)))
        self._first_regions = first_regions

    def digests(self, region: int, low: int = 0, high: int | None = None) -> list[Digest]:
        """Return the digests of the blocks of a region from the number `low` on, below `high`."""
        part = self.parts[bisect_right(self._first_regions, region) - 1]
        if high is None:
            high = -(-int(self.regions.size_bytes[region]) // BLOCK_BYTES)
        first = int(self.regions.first_block[region])
        return unpacked(part.algorithm, part.digests, first + low, first + high)

    @property
    def num_chunks(self) -> int:
        """The number of all chunks."""
        return len(self._offset)

    @cached_property
    def tensors(self) -> Mapping[str, Tensor]:
        """The tensors by name; of one that differs between ranks, the lowest rank's."""
        if self.is_common:
            return dict(zip((name for name, _ in self._row_of), self._entries, strict=True))
        found: dict[str, Tensor] = {}
        for (fqn, _), row in sorted(self._row_of.items(), key=lambda item: item[0][1]):
            found.setdefault(fqn, self._entries[row])
        return found

    @cached_property
    def is_common(self) -> bool:
        """True if no tensor differs between ranks or belongs to a value."""
        return not any(entry.flags for entry in self._entries)

    def whole_chunks(self, entries: Sequence[Tensor]) -> tuple[Any, Any, Any]:
        """Return for each of these tensors, which all ranks have alike, whether all of it is one chunk, and the offset
        and the region of its first chunk. Every part must have been read."""
        rows = np.array([self._row_of[entry.key, -1] for entry in entries], np.int64)
        first = self._bounds[rows]
        if not self.num_chunks:
            return np.zeros(len(rows), bool), first, first
        is_one = (self._bounds[rows + 1] - first == 1) & (self._stored_bytes[rows] == self._sizes_bytes[rows])
        first = np.where(is_one, first, 0)
        return is_one, self._offset[first], self._region[first]

    @cached_property
    def aliases(self) -> Mapping[str, str]:
        """The tensors whose chunks are those of another one, with that other one."""
        if self.outline is not None:
            return self.outline.tied
        found: dict[str, str] = {}
        firsts: dict[tuple[Any, ...], str] = {}
        for key, entry in self.tensors.items():
            chunks = self.chunks(key, 0)
            if chunks and (first := firsts.setdefault((entry.form, *chunks), key)) != key:
                found[key] = first
        return found

    def entry(self, fqn: str, rank: int) -> Tensor | None:
        """Return the tensor as that rank sees it, None when it is missing. The rank -1 sees those alone that all ranks
        have alike."""
        row = self._row_at(fqn, rank)
        return None if row is None else self._entries[row]

    def _row_at(self, fqn: str, rank: int) -> int | None:
        return self._row_of.get((fqn, -1), self._row_of.get((fqn, rank)))

    def ranks_of(self, fqn: str) -> list[int]:
        """Return the ranks that have their own tensor of that name. Of ranks whose parts were not read, only the lowest
        is known."""
        found = {part.rank for part in self.parts if (fqn, part.rank) in self._row_of}
        if self.outline is not None and fqn in self.outline.own:
            found.add(self.outline.own[fqn])
        return sorted(found)

    def chunks(self, fqn: str, rank: int, wanted: Box | None = None) -> list[Chunk]:
        """Return the chunks of a tensor, as that rank sees it, that share elements with the wanted box, or all."""
        row = self._row_at(fqn, rank)
        if row is None:
            return []
        if not self.is_whole and (lacking := self.lacking(fqn, rank, wanted or whole(self._entries[row].shape))):
            raise RuntimeError(f"the parts of ranks {sorted(lacking)[:5]} of the index are needed, and were not read")
        return self._chunks(row, wanted)

    def _chunks(self, row: int, wanted: Box | None) -> list[Chunk]:
        low, high = self._limits[row], self._limits[row + 1]
        dims = len(self._entries[row].shape)
        picked: Any = slice(low, high)
        if wanted is not None and high - low > 1 and dims:
            boxes = self._numbers[self._box[low:high][:, None] + np.arange(2 * dims)]
            starts = np.array(wanted.offsets, np.int64)
            meets = (boxes[:, :dims] < starts + np.array(wanted.sizes, np.int64)) & (
                starts < boxes[:, :dims] + boxes[:, dims:]
            )
            picked = low + np.flatnonzero(meets.all(axis=1))
        columns = (column[picked].tolist() for column in (self._file, self._offset, self._box, self._region))
        rows = zip(*columns, strict=True)
        return [Chunk(file, offset, self._box_at(at, dims), region) for file, offset, at, region in rows]

    def _box_at(self, at: int, dims: int) -> Box:
        """Return the box at a place of the numbers. Equal ones of a part have one place, and mostly there are few."""
        box = self._boxes.get((at, dims))
        if box is None:
            numbers = self._numbers[at : at + 2 * dims].tolist()
            box = self._boxes[at, dims] = Box(tuple(numbers[:dims]), tuple(numbers[dims:]))
        return box

    def check_complete(self) -> None:
        """Raise CheckpointDamaged, naming the tensors, when chunks do not cover a tensor exactly once."""
        wrong = self.incomplete()
        if wrong:
            shown = ", ".join(wrong[:5]) + (f" and {len(wrong) - 5} more" if len(wrong) > 5 else "")
            raise CheckpointDamaged(f"the chunks of {shown} do not cover the tensor exactly once")

    def incomplete(self) -> list[str]:
        """Return the tensors that chunks do not cover exactly once."""
        wrong = self._stored_bytes != self._sizes_bytes
        several = np.flatnonzero(~wrong & (np.diff(self._bounds) > 1) & (self._sizes_bytes > 0))
        wrong[several] = [not self._are_apart(row) for row in several.tolist()]
        return [self._entries[row].key for row in np.flatnonzero(wrong).tolist()]

    def _are_apart(self, row: int) -> bool:
        """Return True if no two chunks of a tensor share an element."""
        low, high, shape = self._limits[row], self._limits[row + 1], self._entries[row].shape
        boxes = self._numbers[self._box[low:high][:, None] + np.arange(2 * len(shape))]
        return are_apart(np.array(shape, np.int64), boxes[:, : len(shape)], boxes[:, len(shape) :])

    @cached_property
    def _sizes_bytes(self) -> np.ndarray[Any, Any]:
        """The size of each tensor."""
        return np.array([entry.size_bytes for entry in self._entries], np.int64)

    def check_files(self, sizes_bytes: Mapping[str, int]) -> None:
        """Raise CheckpointDamaged when a region lies outside its file, or the file is not known."""
        check_files(self.parts, sizes_bytes)

    def common_values(self) -> dict[str, Any]:
        """Return the JSON of the plain values that are for all ranks, by name."""
        return dict(pair for part in self.parts if part.common for pair in _values(part.common))

    def own_values(self, rank: int) -> dict[str, Any]:
        """Return the JSON of the plain values that are that rank's alone, by name."""
        return dict(pair for part in self.parts if part.rank == rank and part.own for pair in _values(part.own))

    def value_ranks(self) -> dict[str, list[int]]:
        """Return, for each plain value that differs between ranks, the ranks that have one; the lowest alone if not all
        parts were read."""
        found: dict[str, list[int]] = {}
        if self.outline is not None and not self.is_whole:
            known = ((key, rank) for key, rank in self.outline.own.items() if (key, rank) not in self._row_of)
            found.update((key, [rank]) for key, rank in known)
            return found
        for part in self.parts:
            for name, _ in _values(part.own) if part.own else ():
                found.setdefault(name, []).append(part.rank)
        return found


def check_files(parts: Iterable[Part], sizes_bytes: Mapping[str, int]) -> None:
    """Raise CheckpointDamaged when a region of a part lies outside its file, or the file is not known."""
    for part in parts:
        missing = [name for name in part.files if name not in sizes_bytes]
        if missing:
            raise CheckpointDamaged(f"the tensor index names {missing[0]!r}, which the checkpoint has not")
        limits = np.array([sizes_bytes[name] for name in part.files] or [0], np.int64)
        regions = part.regions
        beyond = np.flatnonzero(regions.offset + regions.size_bytes > limits[regions.file])
        if len(beyond):
            name = part.files[int(regions.file[beyond[0]])]
            raise CheckpointDamaged(f"the tensor index has a region beyond the end of {name}", file=name)


def layout_digest(parts: Iterable[Part]) -> bytes:
    """Return a digest that is equal for parts that differ in digests of blocks and plain values alone."""
    digest = fingerprinter()
    for part in parts:
        for column in part.layout():
            digest.update(struct.pack("<Q", len(column)))
            digest.update(column)
    return digest.digest()


def values_layout(parts: Iterable[Part]) -> list[Any]:
    """Return the names of all plain values of each part, and the places of wrapped tensors among them."""
    found = []
    for part in parts:
        common, own = (dict(_values(text)) if text else {} for text in (part.common, part.own))
        wrapped = [value for value in common.values() if isinstance(value, dict) and value.get("$t") == "wrapper"]
        found.append((part.rank, [*common], [*own], wrapped))
    return found


def _values(text: bytes) -> Iterator[tuple[str, Any]]:
    try:
        return iter(as_object(parse_json(text)).items())
    except ValueError as error:
        raise CheckpointDamaged(f"plain values are not a JSON object: {error}") from None


def _joined(columns: list[Any]) -> np.ndarray[Any, Any]:
    return np.concatenate(columns) if columns else np.zeros(0, np.int64)


def _shapes(part: Part) -> bytes:
    """Return the shapes of all tensors of a part, for comparing."""
    found = []
    for dims in distinct(part.ndim):
        at = part.shape_at[part.ndim == dims].astype(np.int64)
        found.append(part.numbers[at[:, None] + np.arange(2 * int(dims))].astype(np.int64).tobytes())
    return b"".join([part.ndim.tobytes(), *found])


def _entries_of(part: Part) -> list[Tensor]:
    columns = [column.tolist() for column in (part.dtype, part.ndim, part.flags, part.shape_at)]
    numbers = part.numbers.tolist()
    known: dict[tuple[int, int], Sizes] = {}  # thousands of tensors are alike
    for dims, at in {*zip(columns[1], columns[3], strict=True)}:
        known[dims, at] = tuple(numbers[at + dims : at + 2 * dims])
    shapes = map(known.__getitem__, zip(columns[1], columns[3], strict=True))
    names = map(DTYPE_NAMES.__getitem__, columns[0])
    return list(map(Tensor._make, zip(part.names, names, shapes, columns[2], repeat(0), repeat(""), strict=False)))


def are_apart(shape: Any, offsets: Any, sizes: Any) -> bool:
    """Return True if no two boxes share an element."""
    varying = np.flatnonzero((sizes != shape).any(axis=0))
    if len(varying) == 1:
        order = np.argsort(offsets[:, varying[0]], kind="stable")
        starts, lengths = offsets[order, varying[0]], sizes[order, varying[0]]
        return bool((starts[1:] == starts[:-1] + lengths[:-1]).all())
    ends = offsets + sizes
    order = np.argsort(offsets[:, varying[0]], kind="stable")
    offsets, ends = offsets[order], ends[order]
    last = np.searchsorted(offsets[:, varying[0]], ends[:, varying[0]])
    for index in range(len(offsets)):  # only boxes that begin before this one ends can meet it
        others = slice(index + 1, int(last[index]))
        if ((offsets[others] < ends[index]) & (offsets[index] < ends[others])).all(axis=1).any():
            return False
    return True
