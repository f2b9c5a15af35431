"""The outline of a state: its tensors, the rules by which ranks have them, and the places of the parts of the index.

A tensor that is distributed by a rule needs no list of boxes: its layout says which rank has what. So a reader of the
outline knows whose parts it needs. They lie behind the outline, packed into one file, or each in a file of its rank;
format-v1, "Tensor index". Pure.
"""

from __future__ import annotations

import json
import struct
import zlib
from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import accumulate, repeat
from math import prod
from operator import lt
from typing import Any, NamedTuple

from ckptstore.errors import CheckpointDamaged, UnsupportedVersion
from ckptstore.format.digest import STRUCTURES, Digest
from ckptstore.format.encoding import FORMAT_VERSION, as_list, as_number, as_text, parse_json
from ckptstore.format.naming import spread_directory
from ckptstore.state.index.key_paths import KeyPaths
from ckptstore.state.index.part import DTYPES, MAX_ELEMENTS, PER_RANK, Tensor, inflated
from ckptstore.state.tensors.boxes import Box, Sizes
from ckptstore.state.tensors.layouts import MeshLayout

INDEX_NAME = "tensors.index"
"""The name of its file; one for each checkpoint."""

_MAGIC = b"CKPTTIXO"
_HEADER = struct.Struct("<8sIIQQ")
"""Magic, digest of all bytes behind it in the outline, version, and the sizes of the two texts."""
_CHECKED_FROM = 12
_PLAIN_BYTES = struct.Struct("<Q")


class Extent(NamedTuple):
    """The end of the outline in its file, and the digest of the bytes from `start` to there."""

    start: int
    stop: int
    digest: Digest

    @staticmethod
    def of(data: bytes | memoryview, size_bytes: int) -> Extent:
        """Read the extent from the first bytes of a file of `size_bytes`. Raises CheckpointDamaged, or
        UnsupportedVersion."""
        if len(data) < _HEADER.size or bytes(data[:8]) != _MAGIC:
            raise CheckpointDamaged(f"{INDEX_NAME} does not begin with an outline", file=INDEX_NAME)
        _, value, version, head_bytes, table_bytes = _HEADER.unpack_from(data)
        if version > FORMAT_VERSION:
            raise UnsupportedVersion(
                f"{INDEX_NAME} has version {version}", file=INDEX_NAME, hint="Upgrade ckptstore to read it"
            )
        stop = _HEADER.size + head_bytes + table_bytes
        if version < 1:
            raise CheckpointDamaged(f"{INDEX_NAME} has version {version}, which is none", file=INDEX_NAME)
        if stop > size_bytes:
            raise CheckpointDamaged(f"{INDEX_NAME} has an outline that goes beyond its end", file=INDEX_NAME)
        return Extent(_CHECKED_FROM, stop, Digest(STRUCTURES, value))

    def is_sound(self, data: bytes | memoryview) -> bool:
        """Return True if the first bytes of the file hold the outline, as it was written."""
        held = memoryview(data)[self.start : self.stop]
        return len(data) >= self.stop and self.digest.like(held) == self.digest


def part_name(rank: int, num_prefixes: int) -> str:
    """Return the file of a rank's part of the index, if parts are not packed."""
    return f"{spread_directory(rank, num_prefixes)}tensors-rank={rank:05d}.index"


class PartFile(NamedTuple):
    """A rank's part of the index."""

    size_bytes: int
    digest: Digest


class Span(NamedTuple):
    """Tensors, by their places, of which a rank may have stored something that other ranks have too."""

    rank: int
    first: int
    last: int


class ModuleMetadata(NamedTuple):
    """The notes of a module and those inside it on how they wrote their state, as the version of each class."""

    key: str
    """The key of the module in the state."""
    content: Any
    """The metadata as JSON, in the form of `encode_metadata`."""
    ranks: tuple[int, ...] = ()
    """The ranks that have it, none if all ranks with the key have the same."""


@dataclass(frozen=True)
class Outline:
    """The knowledge of a state without the parts of its index."""

    parts: tuple[PartFile, ...]
    """The part of each rank."""
    table: bytes
    """The tensors and layouts, as `encode_table` returns them: these stay the same from save to save."""
    tied: Mapping[str, str] = field(default_factory=dict)
    """The keys whose bytes are those of another key, with that other key."""
    own: Mapping[str, int] = field(default_factory=dict)
    """The lowest of the ranks that have their own, for each key of a tensor or a value that differs between ranks."""
    common: tuple[int, ...] = ()
    """The ranks whose parts have plain values for all."""
    spans: tuple[Span, ...] = ()
    num_prefixes: int = 1
    """The number of directories over which the files of ranks are spread."""
    is_packed: bool = False
    """True if the parts lie behind the outline, in the order of ranks, and not in separate files."""

    @property
    def world_size(self) -> int:
        """The number of ranks that saved it."""
        return len(self.parts)

    def place(self, rank: int) -> tuple[str, int]:
        """Return the file of a rank's part of the index and the offset in it; a packed one lies behind the outline."""
        return (INDEX_NAME, self._offsets[rank]) if self.is_packed else (part_name(rank, self.num_prefixes), 0)

    @cached_property
    def _offsets(self) -> list[int]:
        return list(accumulate((part.size_bytes for part in self.parts), initial=0))

    @property
    def packed_bytes(self) -> int:
        """The number of bytes that lie behind the outline in its file."""
        return self._offsets[-1] if self.is_packed else 0

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors in the order of keys. One that differs between ranks is the lowest rank's."""
        return self._table[0]

    @cached_property
    def live(self) -> Mapping[str, str]:
        """The dtypes that tensors had in the state, for the keys of those that are stored in another one."""
        return {tensor.key: tensor.live for tensor in self.tensors if tensor.live}

    @property
    def paths(self) -> KeyPaths:
        """The paths that the keys stand for."""
        return self._table[3]

    @property
    def layouts(self) -> tuple[MeshLayout, ...]:
        """The rules by which ranks have tensors."""
        return self._table[1]

    @property
    def modules(self) -> tuple[ModuleMetadata, ...]:
        """The metadata of modules; of one key several, the lowest rank's first, if ranks have different ones."""
        return self._table[2]

    @cached_property
    def _table(self) -> tuple[tuple[Tensor, ...], tuple[MeshLayout, ...], tuple[ModuleMetadata, ...], KeyPaths]:
        with _distrusted():
            return _checked_table(parse_json(_inflated(self.table)), self)

    @cached_property
    def places(self) -> Mapping[str, int]:
        """The place of each tensor."""
        return {tensor.key: place for place, tensor in enumerate(self.tensors)}

    def holders(self, key: str, rank: int, box: Box) -> frozenset[int]:
        """Return the ranks whose parts may have chunks that share elements with a box of a tensor, as that rank sees
        it. No part of another rank has any."""
        place = self.places.get(self.tied.get(key, key))
        if key in self.own:
            return frozenset([rank])
        if place is None:  # it belongs to a value
            return frozenset([*self.common, rank])
        tensor = self.tensors[place]
        if not tensor.layout:
            return self._sharing(place)
        met = self._meeting(tensor, box)
        return met if self.layouts[tensor.layout - 1].num_copies == 1 else met & self._sharing(place)

    def _meeting(self, tensor: Tensor, box: Box) -> frozenset[int]:
        """Return the ranks that have parts of a box. The results are kept, since many tensors are alike."""
        key = tensor.layout, tensor.shape, box
        if key not in self._met:
            layout = self.layouts[tensor.layout - 1]
            self._met[key] = frozenset(layout.ranks_meeting(tensor.shape, box).tolist())
        return self._met[key]

    @cached_property
    def _met(self) -> dict[tuple[int, Sizes, Box], frozenset[int]]:
        return {}

    def _sharing(self, place: int) -> frozenset[int]:
        """Return the ranks that may have stored something of a tensor that others have too."""
        spans, longest = self._by_first
        low = bisect_left(spans, (place - longest,))
        high = bisect_left(spans, (place + 1,))
        return frozenset(rank for _, last, rank in spans[low:high] if last >= place)

    @cached_property
    def _by_first(self) -> tuple[list[tuple[int, int, int]], int]:
        spans = sorted((span.first, span.last, span.rank) for span in self.spans)
        return spans, max((last - first for first, last, _ in spans), default=0)

    def encode(self) -> bytes:
        """Return the outline as bytes, behind which packed parts follow; equal outlines give equal bytes."""
        content = {
            "packed": self.is_packed,
            "num_prefixes": self.num_prefixes,
            "parts": [(part.size_bytes, str(part.digest)) for part in self.parts],
            "tied": dict(sorted(self.tied.items())),
            "own": dict(sorted(self.own.items())),
            "common": self.common,
            "spans": self.spans,
        }
        head = _deflated(content)
        header = _HEADER.pack(_MAGIC, 0, FORMAT_VERSION, len(head), len(self.table))
        checked = b"".join([header[_CHECKED_FROM:], head, self.table])
        value = Digest.of(checked, algorithm=STRUCTURES).value
        return b"".join([_MAGIC, value.to_bytes(4, "little"), checked])

    @staticmethod
    def decode(data: bytes | memoryview) -> Outline:
        """Read an outline from the first bytes of its file, without trust. The table is read when it is needed.

        Raises CheckpointDamaged, or UnsupportedVersion.
        """
        extent = Extent.of(data, len(data))
        if not extent.is_sound(data):
            raise CheckpointDamaged(f"{INDEX_NAME} has a damaged outline", file=INDEX_NAME)
        head_bytes = _HEADER.unpack_from(data)[3]
        head, table = data[_HEADER.size :][:head_bytes], data[_HEADER.size + head_bytes : extent.stop]
        with _distrusted():
            return _checked(parse_json(_inflated(head)), bytes(table))


def encode_table(
    tensors: Sequence[Tensor],
    layouts: Sequence[MeshLayout] = (),
    modules: Sequence[ModuleMetadata] = (),
    paths: KeyPaths | None = None,
) -> bytes:
    """Return the `table` of an outline: its tensors, in the order of keys, the layouts that they have, the metadata of
    modules, and the paths of keys, None for a state that does not tell them."""
    rows = [(tensor.key, tensor.dtype, tensor.shape, tensor.layout) for tensor in tensors]
    live: dict[str, list[int]] = {}
    for place, tensor in enumerate(tensors):
        if tensor.live:
            live.setdefault(tensor.live, []).append(place)
    casts = {"live": live} if live else {}
    noted = {"modules": [(*it[:2], it.ranks) if it.ranks else it[:2] for it in modules]} if modules else {}
    key_paths = {} if paths is None else {"paths": paths.to_json()}
    return _deflated(
        {"layouts": [layout.to_json() for layout in layouts], "tensors": rows, **casts, **noted, **key_paths}
    )


@contextmanager
def _distrusted() -> Iterator[None]:
    """Raise CheckpointDamaged for anything that is wrong with an outline."""
    try:
        yield
    except (struct.error, ValueError, KeyError, TypeError, AttributeError, zlib.error) as error:
        raise CheckpointDamaged(
            f"{INDEX_NAME} has no outline that can be: {str(error)[:200]}", file=INDEX_NAME
        ) from None


def _deflated(content: object) -> bytes:
    text = json.dumps(content, separators=(",", ":")).encode()
    return _PLAIN_BYTES.pack(len(text)) + zlib.compress(text, 1)


def _inflated(data: bytes | memoryview) -> bytes:
    (size_bytes,) = _PLAIN_BYTES.unpack_from(data)
    return inflated(data[_PLAIN_BYTES.size :], size_bytes)


def _checked(content: Mapping[str, Any], table: bytes) -> Outline:
    parts = tuple(PartFile(as_number(size, 1, 1 << 62), Digest.parse(text)) for size, text in as_list(content["parts"]))
    num_prefixes, world_size = as_number(content["num_prefixes"], 1, 1 << 31), len(parts)
    tied = {as_text(key): as_text(first) for key, first in content["tied"].items()}
    if any(first in tied for first in tied.values()):
        raise ValueError("a key is tied to one that is tied itself")
    own = {as_text(key): as_number(rank, 0, world_size) for key, rank in content["own"].items()}
    common = tuple(as_number(rank, 0, world_size) for rank in as_list(content["common"]))
    spans = tuple(_span(row, world_size) for row in as_list(content["spans"]))
    if type(content["packed"]) is not bool:
        raise ValueError("it does not say whether its parts are packed")
    return Outline(parts, table, tied, own, common, spans, num_prefixes, content["packed"])


def _checked_table(
    content: Mapping[str, Any], outline: Outline
) -> tuple[tuple[Tensor, ...], tuple[MeshLayout, ...], tuple[ModuleMetadata, ...], KeyPaths]:
    layouts = tuple(MeshLayout.from_json(value, num_ranks=outline.world_size) for value in as_list(content["layouts"]))
    tensors = _tensors(as_list(content["tensors"]), len(layouts), outline.own)
    if "live" in content:
        tensors = _with_live(tensors, content["live"])
    keys = [tensor.key for tensor in tensors]
    if not all(map(lt, keys, keys[1:])):
        raise ValueError("its keys are not in order")
    if layouts:
        for tensor in tensors:
            if tensor.layout and any(cut.dim >= len(tensor.shape) for cut in layouts[tensor.layout - 1].cuts):
                raise ValueError("a layout cuts a dimension that its tensor has not")
    if outline.tied:
        by_key = dict(zip(keys, tensors, strict=True))
        if any(by_key[key].form != by_key[first].form for key, first in outline.tied.items()):
            raise ValueError("a key is tied to one that is not alike")
    if any(span.last >= len(tensors) for span in outline.spans):
        raise ValueError("a span ends behind the last tensor")
    modules = tuple(_metadata(row, outline.world_size) for row in as_list(content.get("modules", [])))
    paths = KeyPaths.from_json(content["paths"]) if "paths" in content else KeyPaths(is_known=False)
    return tensors, layouts, modules, paths


def _metadata(row: Any, world_size: int) -> ModuleMetadata:
    key, content, ranks = row if len(as_list(row)) == 3 else (*row, [])
    return ModuleMetadata(as_text(key), content, tuple(as_number(rank, 0, world_size) for rank in as_list(ranks)))


def _tensors(rows: Sequence[Sequence[Any]], num_layouts: int, own: Collection[str]) -> tuple[Tensor, ...]:
    """Return the tensors of the rows of a table, after a look at all of them together."""
    if not rows:
        return ()
    keys, dtypes, shapes, layouts = zip(*rows, strict=True)
    if {*map(type, keys)} != {str} or {*map(type, layouts)} != {int}:
        raise ValueError("a tensor has a key that is no text, or a layout that is no number")
    if not 0 <= min(layouts) <= max(layouts) <= num_layouts:
        raise ValueError("a tensor has a layout that is none")
    forms = [_form(dtype, *as_list(shape)) for dtype, shape in zip(dtypes, shapes, strict=True)]
    flags = [PER_RANK if key in own else 0 for key in keys] if own else repeat(0)
    columns = zip(keys, *zip(*forms, strict=True), flags, layouts, repeat(""), strict=False)  # `repeat` has no end
    return tuple(map(Tensor._make, columns))


def _with_live(tensors: Sequence[Tensor], live: Mapping[str, Sequence[int]]) -> tuple[Tensor, ...]:
    """Return the tensors with the dtypes that they had, from their places by dtype."""
    found = list(tensors)
    for dtype, places in live.items():
        for place in as_list(places):
            at = as_number(place, 0, len(tensors))
            if dtype not in DTYPES or DTYPES[dtype][1] <= DTYPES[found[at].dtype][1]:
                raise ValueError("a tensor was cast from a dtype that cannot be")
            found[at] = found[at]._replace(live=dtype)
    return tuple(found)


@lru_cache(maxsize=4096, typed=True)  # thousands of tensors are alike
def _form(dtype: Any, *sizes: Any) -> tuple[str, Sizes]:
    for size in sizes:
        as_number(size, 0, MAX_ELEMENTS)
    if as_text(dtype) not in DTYPES or len(sizes) > 255 or prod(map(float, sizes)) >= MAX_ELEMENTS:
        raise ValueError("a tensor has a dtype or a shape that cannot be")
    return dtype, sizes


def _span(row: Sequence[Any], world_size: int) -> Span:
    rank, first, last = row
    found = Span(as_number(rank, 0, world_size), as_number(first, 0, 1 << 31), as_number(last, 0, 1 << 31))
    if found.first > found.last:
        raise ValueError("a span ends before it begins")
    return found
