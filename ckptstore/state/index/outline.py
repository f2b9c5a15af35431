"""The outline of a state: which tensors there are, and by which rule ranks have them. Pure.

A tensor that is distributed by a rule needs no list of boxes: its layout says which rank has what. Then each rank keeps
its own part of the index in a file of its own, and the outline says whose parts a reader needs; format-v1, "Outline".
"""

from __future__ import annotations

import json
import struct
import zlib
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

from ckptstore.errors import CheckpointDamaged, UnsupportedVersion
from ckptstore.format.digest import Digest
from ckptstore.format.encoding import FORMAT_VERSION
from ckptstore.format.naming import spread_directory
from ckptstore.state.index.part import DTYPES, MAX_ELEMENTS
from ckptstore.state.tensors.boxes import Box, Sizes
from ckptstore.state.tensors.layouts import MeshLayout

OUTLINE_NAME = "tensors.outline"
"""The name of its file: a checkpoint has this one or `tensors.index`."""

_MAGIC = b"CKPTTIXO"
_HEADER = struct.Struct("<8sQ")
_MAX_RATIO = 1100


def part_name(rank: int, num_prefixes: int) -> str:
    """The file in which a rank's part of the index lies, where there is an outline."""
    return f"{spread_directory(rank, num_prefixes)}tensors-rank={rank:05d}.index"


class Outlined(NamedTuple):
    """One tensor."""

    key: str
    dtype: str
    shape: Sizes
    layout: int = 0
    """Its place in the layouts, counted from 1; 0 where it has none: then ranks have all of it, or one does."""


class PartFile(NamedTuple):
    """A rank's part of the index: the size and digest of its file."""

    size_bytes: int
    digest: Digest


class Span(NamedTuple):
    """Tensors of which a rank may have stored something that other ranks have too, by their places."""

    rank: int
    first: int
    last: int


@dataclass(frozen=True)
class Outline:
    """What is known of a state where each rank keeps its part of the index."""

    parts: tuple[PartFile, ...]
    """For each rank."""
    tensors: tuple[Outlined, ...]
    """In the order of keys. Of one that differs between ranks it is the lowest rank's."""
    layouts: tuple[MeshLayout, ...] = ()
    tied: Mapping[str, str] = field(default_factory=dict)
    """For a key whose bytes lie where another one's do, that other one."""
    own: Mapping[str, int] = field(default_factory=dict)
    """For each key, of a tensor or a value, of which ranks have their own: the lowest of these ranks."""
    common: tuple[int, ...] = ()
    """The ranks whose parts have plain values for all."""
    spans: tuple[Span, ...] = ()
    num_prefixes: int = 1
    """Over how many directories the files of ranks are spread."""

    @property
    def world_size(self) -> int:
        """How many ranks saved it."""
        return len(self.parts)

    def part_name(self, rank: int) -> str:
        """The file of a rank's part of the index."""
        return part_name(rank, self.num_prefixes)

    @cached_property
    def places(self) -> Mapping[str, int]:
        """The place of each tensor."""
        return {tensor.key: place for place, tensor in enumerate(self.tensors)}

    def holders(self, key: str, rank: int, box: Box) -> frozenset[int]:
        """The ranks whose parts may have chunks that share elements with a box of a tensor, as that rank sees it. No
        part of another rank has any."""
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

    def _meeting(self, tensor: Outlined, box: Box) -> frozenset[int]:
        """The ranks that have parts of a box; many tensors are alike."""
        asked = tensor.layout, tensor.shape, box
        if asked not in self._met:
            layout = self.layouts[tensor.layout - 1]
            self._met[asked] = frozenset(layout.ranks_meeting(tensor.shape, box).tolist())
        return self._met[asked]

    @cached_property
    def _met(self) -> dict[tuple[int, Sizes, Box], frozenset[int]]:
        return {}

    def _sharing(self, place: int) -> frozenset[int]:
        """The ranks that may have stored something of a tensor that others have too."""
        return frozenset(span.rank for span in self._spans_at(place))

    def _spans_at(self, place: int) -> Iterable[Span]:
        spans, longest = self._by_first
        low = bisect_left(spans, (place - longest,))
        high = bisect_left(spans, (place + 1,))
        return (Span(rank, first, last) for first, last, rank in spans[low:high] if last >= place)

    @cached_property
    def _by_first(self) -> tuple[list[tuple[int, int, int]], int]:
        spans = sorted((span.first, span.last, span.rank) for span in self.spans)
        return spans, max((last - first for first, last, _ in spans), default=0)

    def encode(self) -> bytes:
        """The outline as bytes; equal outlines give equal bytes."""
        content = {
            "version": FORMAT_VERSION,
            "num_prefixes": self.num_prefixes,
            "parts": [(part.size_bytes, str(part.digest)) for part in self.parts],
            "layouts": [layout.to_json() for layout in self.layouts],
            "tensors": self.tensors,
            "tied": dict(sorted(self.tied.items())),
            "own": dict(sorted(self.own.items())),
            "common": self.common,
            "spans": self.spans,
        }
        text = json.dumps(content, separators=(",", ":")).encode()
        return _HEADER.pack(_MAGIC, len(text)) + zlib.compress(text, 6)

    @staticmethod
    def decode(data: bytes | memoryview, *, file: str = OUTLINE_NAME) -> Outline:
        """Read an outline, and distrust it. Raises CheckpointDamaged, or UnsupportedVersion."""
        try:
            content = json.loads(_inflated(data))
            if _number(content["version"], 1, 1 << 31) > FORMAT_VERSION:
                raise UnsupportedVersion(f"{file} has another version", file=file, hint="Upgrade ckptstore to read it")
            return _checked(content)
        except (struct.error, ValueError, KeyError, TypeError, AttributeError, RecursionError, zlib.error) as error:
            raise CheckpointDamaged(f"{file} is not an outline: {str(error)[:200]}", file=file) from None


def _inflated(data: bytes | memoryview) -> bytes:
    magic, size_bytes = _HEADER.unpack_from(data)
    deflated = data[_HEADER.size :]
    if magic != _MAGIC or size_bytes > len(deflated) * _MAX_RATIO:
        raise ValueError("its header is wrong")
    stream = zlib.decompressobj()
    text = stream.decompress(deflated, size_bytes + 1)
    if len(text) != size_bytes or not stream.eof or stream.unused_data:
        raise ValueError("its length is wrong")
    return text


def _checked(content: Mapping[str, Any]) -> Outline:
    parts = tuple(PartFile(_number(size, 1, 1 << 62), Digest.parse(text)) for size, text in content["parts"])
    num_prefixes, world_size = _number(content["num_prefixes"], 1, 1 << 31), len(parts)
    layouts = tuple(MeshLayout.from_json(value, num_ranks=world_size) for value in content["layouts"])
    tensors = tuple(_outlined(row, len(layouts)) for row in content["tensors"])
    keys = [tensor.key for tensor in tensors]
    if any(left >= right for left, right in pairwise(keys)):
        raise ValueError("its keys are not in order")
    for tensor in tensors:
        if tensor.layout and any(cut.dim >= len(tensor.shape) for cut in layouts[tensor.layout - 1].cuts):
            raise ValueError("a layout cuts a dimension that its tensor has not")
    tied = {_text(key): _text(first) for key, first in content["tied"].items()}
    _check_tied(tied, {tensor.key: tensor for tensor in tensors})
    own = {_text(key): _number(rank, 0, world_size) for key, rank in content["own"].items()}
    common = tuple(_number(rank, 0, world_size) for rank in content["common"])
    spans = tuple(_span(row, world_size, len(tensors)) for row in content["spans"])
    return Outline(parts, tensors, layouts, tied, own, common, spans, num_prefixes)


def _check_tied(tied: Mapping[str, str], tensors: Mapping[str, Outlined]) -> None:
    for key, first in tied.items():
        if first in tied or tensors[key][1:3] != tensors[first][1:3]:
            raise ValueError("a key is tied to what is not there, or is not alike")


def _outlined(row: Sequence[Any], num_layouts: int) -> Outlined:
    key, dtype, shape, layout = row
    sizes = tuple(_number(size, 0, MAX_ELEMENTS) for size in shape)
    if _text(dtype) not in DTYPES or len(sizes) > 255 or prod(map(float, sizes)) >= MAX_ELEMENTS:
        raise ValueError("a tensor has a dtype or a shape that cannot be")
    return Outlined(_text(key), dtype, sizes, _number(layout, 0, num_layouts + 1))


def _span(row: Sequence[Any], world_size: int, num_tensors: int) -> Span:
    rank, first, last = row
    found = Span(_number(rank, 0, world_size), _number(first, 0, num_tensors), _number(last, 0, num_tensors))
    if found.first > found.last:
        raise ValueError("a span ends before it begins")
    return found


def _number(value: Any, low: int, high: int) -> int:
    if type(value) is not int or not low <= value < high:
        raise ValueError(f"{str(value)[:40]} is not a number from {low} to {high - 1}")
    return value


def _text(value: Any) -> str:
    if type(value) is not str:
        raise ValueError(f"{str(value)[:40]} is no text")
    return value
