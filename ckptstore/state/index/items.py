"""The items of a rank's state, without the bytes: ranks exchange them to agree on who writes what. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import lru_cache
from typing import Any, NamedTuple

from ckptstore.state.index.key_paths import KeyPaths
from ckptstore.state.index.part import DTYPES
from ckptstore.state.tensors.boxes import Box, Sizes
from ckptstore.state.tensors.layouts import MeshLayout


class Mode(IntEnum):
    """The rule by which the ranks that have a key share the work."""

    SHARD = 0
    """Each rank writes the boxes that it alone has."""
    MESH = 1
    """Several ranks have the same box by their mesh; each of them that has the key writes a part of it."""
    SPLIT = 2
    """Every rank that has the key has the same whole tensor; each writes a part of it."""
    LOWEST = 3
    """The lowest rank that has the tensor writes it whole."""
    COMPARE = 4
    """As SPLIT if the digests of all ranks are equal; else each rank writes its own."""
    VALUE = 5
    """A plain value. The lowest rank that has it writes it if all digests are equal; else each rank its own."""
    BESIDE = 6
    """A tensor that belongs to the value `owner`, and is written where that is."""


WHOLE_MODES = frozenset({Mode.SPLIT, Mode.LOWEST, Mode.COMPARE, Mode.VALUE})
"""The modes in which ranks may differ: then each keeps its own."""
DIGEST_BYTES = 16


class Item(NamedTuple):
    """One key of the state, as one rank has it."""

    key: str
    mode: Mode
    dtype: str = ""
    shape: Sizes = ()
    boxes: tuple[Box, ...] = ()
    """The boxes of the tensor that this rank has, each in separate memory."""
    sharers: tuple[int, ...] = ()
    """MESH: the ranks that have the same box by their mesh, as torch numbers them. Some may not have the key."""
    position: int = 0
    """MESH: the place of this rank among the sharers."""
    group: int = 0
    """SHARD and MESH: the lowest of the ranks over which the tensor is distributed. Ranks outside of them may have a
    copy of their own."""
    tied_to: str = ""
    """The key that has the same memory."""
    owner: str = ""
    layout: MeshLayout | None = None
    """SHARD and MESH: the rule by which ranks have it, in torch's numbers of the ranks; None without a rule."""
    member: int = -1
    """Torch's number of this rank, if it has a layout; -1 for a rank outside of the mesh."""
    live: str = ""
    """The dtype of the tensor itself, if it is stored in another one."""
    digest: bytes = b""
    """COMPARE and VALUE: the fingerprint of the content. The last field, for `without_digests`."""

    @property
    def size_bytes(self) -> int:
        """The bytes of the boxes that this rank has."""
        return _size_bytes(self.dtype, self.boxes)


@lru_cache(maxsize=65_536)  # thousands of tensors are alike
def _size_bytes(dtype: str, boxes: tuple[Box, ...]) -> int:
    return sum([box.volume for box in boxes]) * DTYPES[dtype][1] if boxes else 0


def without_digests(items: Sequence[Item]) -> list[tuple[Any, ...]]:
    """Return all fields of the items but their digests: equal for the same structure."""
    return [item[:-1] for item in items]


class Row(NamedTuple):
    """An item without boxes and digests."""

    key: str
    mode: int
    dtype: str
    shape: Sizes
    tied_to: str
    owner: str
    group: int
    layout: int = 0
    """The place in the layouts of the structure, counted from 1; 0 without a layout."""
    live: str = ""


@dataclass(frozen=True, slots=True)
class Structure:
    """The items of a rank without boxes and digests: equal on ranks that run the same program."""

    rows: tuple[Row, ...]
    """The rows in the order of keys."""
    layouts: tuple[MeshLayout, ...] = ()
    modules: tuple[tuple[str, str], ...] = ()
    """The keys of modules, each with the JSON text of its metadata."""
    paths: KeyPaths = field(default_factory=KeyPaths)

    @staticmethod
    def of(items: Sequence[Item], modules: Mapping[str, str] | None = None, paths: KeyPaths | None = None) -> Structure:
        """Return the structure of items that are sorted by key, with the metadata of modules and the paths of keys."""
        places: dict[MeshLayout, int] = {}
        known: dict[int, int] = {}  # a layout lists ranks, and thousands of tensors have the same object

        def place(layout: MeshLayout | None) -> int:
            if layout is None:
                return 0
            if id(layout) not in known:
                known[id(layout)] = places.setdefault(layout, len(places) + 1)
            return known[id(layout)]

        rows = tuple(
            Row(
                item.key, int(item.mode), item.dtype, item.shape, item.tied_to, item.owner, item.group,
                place(item.layout), item.live,
            )
            for item in items
        )  # fmt: skip
        return Structure(rows, tuple(places), tuple(sorted((modules or {}).items())), paths or KeyPaths())

    def encode(self) -> bytes:
        """Return the structure as bytes; equal structures give equal bytes."""
        layouts = [layout.to_json() for layout in self.layouts]
        return json.dumps([self.rows, layouts, self.modules, self.paths.to_json()], separators=(",", ":")).encode()

    @staticmethod
    def decode(data: bytes) -> Structure:
        """Read the output of `encode` of another rank of the same job."""
        rows, layouts, modules, paths = json.loads(data)
        return Structure(
            tuple(Row(key, mode, dtype, tuple(shape), *rest) for key, mode, dtype, shape, *rest in rows),
            tuple(map(MeshLayout.from_json, layouts)),
            tuple((key, text) for key, text in modules),
            KeyPaths.from_json(paths),
        )

    def compared(self) -> list[str]:
        """Return the keys that have digests, in order."""
        return [row.key for row in self.rows if row.mode in (Mode.COMPARE, Mode.VALUE)]
