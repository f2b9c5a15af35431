"""The leader's outline of a checkpoint, its choice to pack the parts of ranks behind it, and its checks that the files
hold everything that any rank has. Pure."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import NamedTuple

import numpy as np

from ckptstore.errors import InvalidState
from ckptstore.format.digest import Digest
from ckptstore.runtime.shown import show_ranks
from ckptstore.state.index.items import Mode, Row, Structure
from ckptstore.state.index.key_paths import KeyPaths
from ckptstore.state.index.outline import ModuleMetadata, Outline, PartFile, Span, encode_table
from ckptstore.state.index.part import Tensor, total_bytes
from ckptstore.state.index.tensor_index import TensorIndex, are_apart
from ckptstore.state.tensors.layouts import MeshLayout

MANY_CHUNKS = 200_000
"""The most chunks of an index whose parts are packed, if each rank can write its own part instead."""
_SHOWN = 5


class RankTold(NamedTuple):
    """A rank's report to the leader on its stored files."""

    size_bytes: int
    """The size of the tensors that it has written, tied ones once."""
    num_common: int
    """The number of plain values that it has written for all."""
    num_own: int
    """The number of plain values that it has written for itself alone."""
    spans: Sequence[Sequence[int]]
    """`RankPlan.spans`."""
    part: tuple[int, str]
    """The size and the digest of its part of the index."""


@dataclass(frozen=True)
class RankStructures:
    """The structures of all ranks."""

    structures: Sequence[Structure]
    classes: Sequence[int]
    """The number of each rank's structure."""
    layouts: Sequence[Sequence[MeshLayout | None]]
    """The layouts of each structure, in the numbers that ranks have in the group; None for one over other ranks."""
    can_spread: bool
    """True if the index is large, and each rank can write its part of it unseen, because rules say what it has."""

    @staticmethod
    def of(structures: Sequence[Structure], classes: Sequence[int], members: Sequence[int]) -> RankStructures:
        """Return the structures of all ranks; `members` has torch's number of each rank."""
        rank_of = {member: rank for rank, member in enumerate(members) if member >= 0}
        layouts = [[layout.renumbered(rank_of) for layout in structure.layouts] for structure in structures]
        is_seen = any(layout is None for found in layouts for layout in found) or any(
            _is_seen(row) for structure in structures for row in structure.rows
        )
        can_spread = not is_seen and _num_chunks(structures, layouts) > MANY_CHUNKS
        return RankStructures(structures, classes, layouts, can_spread)

    @cached_property
    def _keys(self) -> Mapping[str, tuple[int, ...]]:
        """The structures that have a key, for each key."""
        found: dict[str, list[int]] = {}
        for number, structure in enumerate(self.structures):
            for row in structure.rows:
                found.setdefault(row.key, []).append(number)
        known: dict[tuple[int, ...], tuple[int, ...]] = {}  # most keys are in the same structures
        return {key: known.setdefault(tuple(numbers), tuple(numbers)) for key, numbers in found.items()}

    def size_bytes(self, differs: Collection[str]) -> int:
        """Return the size of all tensors: each once, or once for each rank that keeps its own."""
        apart, once = 0, dict[str, int]()
        for number, structure in enumerate(self.structures):
            for row in structure.rows:
                if row.dtype and not row.tied_to:
                    size_bytes = total_bytes(row.dtype, row.shape)
                    if row.key in differs or row.owner in differs:
                        apart += size_bytes * self.classes.count(number)
                    else:
                        once[row.key] = size_bytes
        return apart + sum(once.values())

    def ranks_of(self, key: str) -> list[int]:
        """Return the ranks that have a key, or parts of it."""
        parts = (numbers for name, numbers in self._keys.items() if name.startswith(f"{key}@"))
        numbers = self._keys.get(key) or {number for part in parts for number in part}
        return [rank for rank, number in enumerate(self.classes) if number in numbers]

    def check(self, index: TensorIndex) -> None:
        """Raise InvalidState, with keys and ranks, unless every key exists for each rank that has it, and every tensor
        with all its elements, once."""
        holes = [*index.incomplete(), *_torn(index)]
        if holes:
            raise _refusal(f"the chunks of {self._words(holes)} do not cover the tensor exactly once")
        lost = self._lost(index)
        if lost:
            raise _refusal(f"{self._words(lost)} would be in no file of the checkpoint")

    def _lost(self, index: TensorIndex) -> list[str]:
        common = index.common_values()
        apart = [key for key in self._keys if key not in common and index.entry(key, -1) is None]
        values = {part.rank: index.own_values(part.rank) for part in index.parts} if apart else {}

        def has(rank: int, key: str) -> bool:
            return key in values[rank] or index.entry(key, rank) is not None

        return sorted(key for key in apart if not all(has(rank, key) for rank in self.ranks_of(key)))

    def _words(self, keys: Sequence[str]) -> str:
        shown = [f"{key} ({show_ranks(ranks)})" if (ranks := self.ranks_of(key)) else key for key in keys[:_SHOWN]]
        return ", ".join(shown) + (f" and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else "")


def _is_distributed(row: Row) -> bool:
    return row.mode in (Mode.SHARD, Mode.MESH)


def _is_seen(row: Row) -> bool:
    """Return True if only the index shows who has what: of distributed tensors without a rule, and of the value of what
    may be a wrapped part of one, of which each rank has one under its own key."""
    return (row.mode == Mode.VALUE and "@" in row.key) or (_is_distributed(row) and not row.layout)


def _num_chunks(structures: Sequence[Structure], layouts: Sequence[Sequence[MeshLayout | None]]) -> int:
    """Return the approximate number of chunks of distributed tensors."""
    found: dict[str, int] = {}
    for structure, held in zip(structures, layouts, strict=True):
        for row in structure.rows:
            if row.layout and row.key not in found and (layout := held[row.layout - 1]) is not None:
                found[row.key] = layout.num_boxes(row.shape)
    return sum(found.values())


class Outliner:
    """Makes the outlines of saves whose ranks have the same structures and the same agreement."""

    def __init__(
        self,
        described: RankStructures,
        *,
        differs: Collection[str],
        untied: Collection[str],
        copies: Mapping[str, Sequence[int]],
    ) -> None:
        """Index the rows of all structures; `differs`, `untied` and `copies` are those of the `Agreement`."""
        self._described = described
        self._differs, self._untied = differs, untied
        self._sizes = Counter(described.classes)
        self._lowest = [described.classes.index(number) for number in range(len(described.structures))]
        self._rows = [{row.key: row for row in structure.rows} for structure in described.structures]
        self._first: dict[str, tuple[Row, int]] = {}
        """The row of the lowest rank whose copy is stored, and the number of its structure, for each key."""
        for number in sorted(range(len(self._rows)), key=self._lowest.__getitem__):
            for key, row in self._rows[number].items():
                if not _is_distributed(row) or row.group == copies.get(key, (row.group,))[0]:
                    self._first.setdefault(key, (row, number))

    def _is_own(self, row: Row) -> bool:
        """Return True if each rank keeps its own."""
        others = {row.key, row.owner, row.tied_to if row.key not in self._untied else ""}
        return not others.isdisjoint(self._differs)

    def _layout_of(self, row: Row, number: int) -> MeshLayout | None:
        return self._described.layouts[number][row.layout - 1] if row.layout else None

    def outline(self, told: Sequence[RankTold], *, num_prefixes: int, is_packed: bool) -> Outline:
        """Return the outline that the leader writes. Check it first if the parts are not packed, since nobody has read
        them: raise InvalidState then, with keys and ranks, for anything that is missing."""
        if not is_packed:
            self.check(told)
        parts = tuple(PartFile(size_bytes, Digest.parse(text)) for size_bytes, text in (one.part for one in told))
        common = tuple(rank for rank, one in enumerate(told) if one.num_common)
        rest = common, self._spans(told), num_prefixes, is_packed
        return Outline(parts, self._table, self._tied, self._own, *rest)

    @cached_property
    def _tensors(self) -> list[tuple[str, Row, int]]:
        """The tensors of the outline, in the order of keys, each with the number of its structure."""
        return [
            (key, row, number)
            for key, (row, number) in sorted(self._first.items())
            if row.dtype and row.mode != Mode.BESIDE
        ]

    @cached_property
    def _table(self) -> bytes:
        places: dict[MeshLayout, int] = {}

        def place(layout: MeshLayout | None) -> int:
            return 0 if layout is None else places.setdefault(layout, len(places) + 1)

        tensors = [
            Tensor(key, row.dtype, row.shape, layout=place(self._layout_of(row, number)), live=row.live)
            for key, row, number in self._tensors
        ]
        paths = KeyPaths.joined(structure.paths for structure in self._described.structures)
        return encode_table(tensors, tuple(places), self._noted_modules, paths)

    @cached_property
    def _noted_modules(self) -> list[ModuleMetadata]:
        """The metadata of modules: once for all ranks that have the same."""
        found: dict[tuple[str, str], list[int]] = {}
        for number in sorted(range(len(self._rows)), key=self._lowest.__getitem__):
            for entry in self._described.structures[number].modules:
                found.setdefault(entry, []).append(number)
        having = {key: [numbers for (name, _), numbers in found.items() if name == key] for key, _ in found}
        classes = self._described.classes
        return [
            ModuleMetadata(
                key,
                json.loads(text),
                () if len(having[key]) == 1 else tuple(rank for rank, one in enumerate(classes) if one in numbers),
            )
            for (key, text), numbers in found.items()
        ]

    @cached_property
    def _tied(self) -> dict[str, str]:
        return {key: row.tied_to for key, row, _ in self._tensors if row.tied_to and key not in self._untied}

    @cached_property
    def _own(self) -> dict[str, int]:
        return {
            key: self._lowest[number]
            for key, (row, number) in self._first.items()
            if row.mode != Mode.BESIDE and self._is_own(row)
        }

    @cached_property
    def _places(self) -> tuple[list[list[int]], list[list[int]]]:
        """The places in the outline of each structure's tensors, and the number of them before each item."""
        places = {key: place for place, (key, _, _) in enumerate(self._tensors)}
        of_items = [[places[key] for key in rows if key in places] for rows in self._rows]
        return of_items, [list(accumulate((key in places for key in rows), initial=0)) for rows in self._rows]

    def _spans(self, told: Sequence[RankTold]) -> tuple[Span, ...]:
        """Return the spans of each rank's items as places in the outline."""
        # A layout over ranks of other groups does not say who has what: then each rank may have anything.
        of_items, before = self._places
        is_unknown = any(layout is None for found in self._described.layouts for layout in found)
        found = []
        for rank, one in enumerate(told):
            number = self._described.classes[rank]
            for first, last in [(0, len(before[number]) - 2)] if is_unknown else one.spans:
                held = of_items[number][before[number][first] : before[number][last + 1]]
                if held:
                    found.append(Span(rank, held[0], held[-1]))
        return tuple(found)

    def check(self, told: Sequence[RankTold]) -> None:
        """Raise InvalidState unless the layouts cover every tensor, by ranks that have it, and every byte and value was
        written."""
        for key, (row, number) in self._first.items():
            if (layout := self._layout_of(row, number)) is not None:
                self._check_layout(key, row, layout)
        size_bytes = sum(one.size_bytes for one in told)
        expected_bytes = self._described.size_bytes(self._differs)
        if size_bytes != expected_bytes and not self._untied:  # those that are tied differently count twice
            raise _refusal(f"The ranks wrote {size_bytes} bytes of tensors that have {expected_bytes}")
        values = [row for row, _ in self._first.values() if row.mode == Mode.VALUE]
        own = [row.key for row in values if row.key in self._differs]
        num_own = sum(self._sizes[number] for key in own for number, rows in enumerate(self._rows) if key in rows)
        for what, has, expected in [
            ("values for all", sum(one.num_common for one in told), len(values) - len(own)),
            ("values of their own", sum(one.num_own for one in told), num_own),
        ]:
            if has != expected:
                raise _refusal(f"The ranks wrote {has} {what}, and they have {expected}")

    def _check_layout(self, key: str, row: Row, layout: MeshLayout) -> None:
        """Raise InvalidState unless every box has a rank that has the tensor in this very layout."""
        having = {
            number for number, rows in enumerate(self._rows) if self._has_alike(rows.get(key), number, row, layout)
        }
        if len(having) == len(self._rows):
            return
        has = {rank for rank in layout.ranks if self._described.classes[rank] in having}
        lacking = [
            rank
            for rank in layout.ranks
            if has.isdisjoint(layout.sharers_of(rank)) and layout.boxes_of(rank, row.shape)
        ]
        if lacking:
            raise _refusal(f"{key} ({show_ranks(lacking)}) would be in no file of the checkpoint")

    def _has_alike(self, found: Row | None, number: int, row: Row, layout: MeshLayout) -> bool:
        if found is None or not found.layout:
            return False
        return found.shape == row.shape and self._layout_of(found, number) == layout


def _refusal(what: str) -> InvalidState:
    return InvalidState(
        f"{what}: the ranks differ in what they have of it",
        hint="All ranks must give the same structure for what they share",
    )


def _torn(index: TensorIndex) -> list[str]:
    """Return the distributed tensors whose wrapped parts do not cover them exactly once."""
    parts: dict[str, list[tuple[list[int], list[int]]]] = {}
    shapes: dict[str, list[int]] = {}
    for value in index.common_values().values():
        if isinstance(value, dict) and value.get("$t") == "wrapper" and value["v"]["part"]:
            key, offsets, shape = value["v"]["part"]
            parts.setdefault(key, []).append((offsets, value["v"]["shape"]))
            shapes[key] = shape
    return [key for key, boxes in parts.items() if not _is_covered(shapes[key], boxes)]


def _is_covered(shape: list[int], boxes: list[tuple[list[int], list[int]]]) -> bool:
    places = np.array(boxes, np.int64)
    is_full = int(places[:, 1].prod(axis=1).sum()) == prod(shape)
    return is_full and (len(boxes) == 1 or are_apart(np.array(shape, np.int64), places[:, 0], places[:, 1]))
