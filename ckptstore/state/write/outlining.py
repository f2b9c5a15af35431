"""Where each rank keeps its part of the index: when that is possible, and the outline that the leader writes. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from ckptstore.errors import InvalidState
from ckptstore.format.digest import Digest
from ckptstore.group.base import spoken
from ckptstore.state.index.items import Mode, Row, Structure, total_bytes
from ckptstore.state.index.outline import Outline, Outlined, PartFile, Span
from ckptstore.state.tensors.layouts import MeshLayout

MANY_CHUNKS = 200_000
"""An index of more chunks is not listed in one file where an outline can take its place."""


class RankTold(NamedTuple):
    """What a rank tells the leader of what it has stored, in place of its part of the index."""

    size_bytes: int
    """Of the tensors that it has written, tied ones once."""
    num_common: int
    """How many plain values it has written for all."""
    num_own: int
    """How many it has written for itself alone."""
    spans: Sequence[Sequence[int]]
    """`RankPlan.spans`."""
    part: tuple[int, str]
    """Size and digest of the file of its part of the index."""


@dataclass(frozen=True, slots=True)
class Outlinable:
    """Structures that an outline can be made of."""

    structures: Sequence[Structure]
    classes: Sequence[int]
    """For each rank the number of its structure."""
    layouts: Sequence[Sequence[MeshLayout]]
    """For each structure its layouts, in the numbers that ranks have in the group."""


def outlinable_of(structures: Sequence[Structure], classes: Sequence[int], members: Sequence[int]) -> Outlinable | None:
    """The structures, if they are of many chunks and every distributed tensor has a layout; else None.

    `members` has torch's number of each rank.
    """
    rank_of = {member: rank for rank, member in enumerate(members) if member >= 0}
    layouts: list[list[MeshLayout]] = []
    for structure in structures:
        found = [layout.renumbered(rank_of) for layout in structure.layouts]
        if None in found:
            return None
        layouts.append([layout for layout in found if layout is not None])
    described = Outlinable(structures, classes, layouts)
    distributed = [row for structure in structures for row in structure.rows if _is_distributed(row)]
    if any(not row.layout for row in distributed) or any(_is_part(row) for one in structures for row in one.rows):
        return None
    return described if _num_chunks(described) > MANY_CHUNKS else None


def _is_distributed(row: Row) -> bool:
    return row.mode in (Mode.SHARD, Mode.MESH)


def _is_part(row: Row) -> bool:
    """Whether it may be the value of a wrapped part of a distributed tensor: each rank has one under its own key, and
    the index alone says whether they cover the tensor."""
    return row.mode == Mode.VALUE and "@" in row.key


def _num_chunks(described: Outlinable) -> int:
    """About how many chunks an index would list."""
    found: dict[str, int] = {}
    for structure, layouts in zip(described.structures, described.layouts, strict=True):
        for row in structure.rows:
            if row.layout and row.key not in found:
                found[row.key] = layouts[row.layout - 1].num_boxes(row.shape)
    return sum(found.values())


@dataclass(frozen=True, slots=True)
class Agreed:
    """What the ranks have agreed on; see `Agreement`."""

    differs: Collection[str]
    untied: Collection[str]
    copies: Mapping[str, Sequence[int]]


def outline_of(described: Outlinable, agreed: Agreed, told: Sequence[RankTold], *, num_prefixes: int) -> Outline:
    """The outline of what all ranks have stored. Raises InvalidState, with keys and ranks, for what is missing."""
    builder = _Outliner(described, agreed)
    builder.check(told)
    return builder.outline(told, num_prefixes)


class _Outliner:
    def __init__(self, described: Outlinable, agreed: Agreed) -> None:
        self._described = described
        self._differs, self._untied = agreed.differs, agreed.untied
        self._sizes = Counter(described.classes)
        self._lowest = [described.classes.index(number) for number in range(len(described.structures))]
        self._rows = [{row.key: row for row in structure.rows} for structure in described.structures]
        self._first: dict[str, tuple[Row, int]] = {}
        """For each key the row of the lowest rank whose copy is stored, and the number of its structure."""
        for number in sorted(range(len(self._rows)), key=self._lowest.__getitem__):
            for key, row in self._rows[number].items():
                if not _is_distributed(row) or row.group == agreed.copies.get(key, (row.group,))[0]:
                    self._first.setdefault(key, (row, number))

    def _is_own(self, row: Row) -> bool:
        """Whether each rank keeps its own."""
        others = [row.owner, row.tied_to if row.key not in self._untied else ""]
        return row.key in self._differs or any(other and other in self._differs for other in others)

    def _layout_of(self, row: Row, number: int) -> MeshLayout:
        return self._described.layouts[number][row.layout - 1]

    def outline(self, told: Sequence[RankTold], num_prefixes: int) -> Outline:
        """What the leader writes."""
        tensors, own, tied = [], dict[str, int](), dict[str, str]()
        layouts: dict[MeshLayout, int] = {}
        for key, (row, number) in sorted(self._first.items()):
            if self._is_own(row) and row.mode != Mode.BESIDE:
                own[key] = self._lowest[number]
            if row.dtype and row.mode != Mode.BESIDE:
                place = layouts.setdefault(self._layout_of(row, number), len(layouts) + 1) if row.layout else 0
                tensors.append(Outlined(key, row.dtype, row.shape, place))
                if row.tied_to and key not in self._untied:
                    tied[key] = row.tied_to
        common = tuple(rank for rank, one in enumerate(told) if one.num_common)
        parts = tuple(PartFile(size_bytes, Digest.parse(text)) for size_bytes, text in (one.part for one in told))
        spans = self._spans(tensors, told)
        return Outline(parts, tuple(tensors), tuple(layouts), tied, own, common, spans, num_prefixes)

    def _spans(self, tensors: Sequence[Outlined], told: Sequence[RankTold]) -> tuple[Span, ...]:
        """The items of each rank's structure as places in the outline."""
        places = {tensor.key: place for place, tensor in enumerate(tensors)}
        of_items = [[places[key] for key in rows if key in places] for rows in self._rows]
        before = [list(accumulate((key in places for key in rows), initial=0)) for rows in self._rows]
        found = []
        for rank, one in enumerate(told):
            number = self._described.classes[rank]
            for first, last in one.spans:
                held = of_items[number][before[number][first] : before[number][last + 1]]
                if held:
                    found.append(Span(rank, held[0], held[-1]))
        return tuple(found)

    def check(self, told: Sequence[RankTold]) -> None:
        """Raise InvalidState unless the layouts cover every tensor, by ranks that have it, and every byte and value was
        written."""
        for key, (row, number) in self._first.items():
            if row.layout:
                self._check_layout(key, row, self._layout_of(row, number))
        size_bytes = sum(one.size_bytes for one in told)
        if size_bytes != self._expected_bytes() and not self._untied:  # those that are tied differently count twice
            raise _refusal(f"The ranks wrote {size_bytes} bytes of tensors that have {self._expected_bytes()}")
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
        """Every box has a rank that has the tensor, in this very layout."""
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
            raise _refusal(f"{key} ({spoken(lacking)}) would be in no file of the checkpoint")

    def _has_alike(self, found: Row | None, number: int, row: Row, layout: MeshLayout) -> bool:
        if found is None or not found.layout:
            return False
        return found.shape == row.shape and self._layout_of(found, number) == layout

    def _expected_bytes(self) -> int:
        """The size of all tensors: each once, or once for each rank that keeps its own."""
        once = sum(
            total_bytes(row.dtype, row.shape) for row, _ in self._first.values() if self._is_written(row, own=False)
        )
        return once + sum(
            total_bytes(row.dtype, row.shape) * self._sizes[number]
            for number, rows in enumerate(self._rows)
            for row in rows.values()
            if self._is_written(row, own=True)
        )

    def _is_written(self, row: Row, *, own: bool) -> bool:
        return bool(row.dtype) and not row.tied_to and self._is_own(row) == own


def _refusal(what: str) -> InvalidState:
    return InvalidState(
        f"{what}: the ranks differ in what they have of it",
        hint="All ranks must give the same structure for what they share",
    )
