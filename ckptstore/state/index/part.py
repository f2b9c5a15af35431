"""One rank's part of the tensor index: the places of its boxes of tensors in its files, in columns. Pure.

A part is a fixed header, columns of little-endian numbers, and three deflated texts (tensor names, file names, plain
values); format-v1, "Tensor index", has it byte by byte. A chunk costs 16 bytes beside its tensor's row and its box, and
equal boxes are kept once. Chunks are in the order of files and offsets.

Digests are of regions: a payload of at least 1 MiB is a separate region; smaller ones lie in slabs, stretches of a file
that hold many frames. Each block of 1 MiB of a region, counted from the start of the region, has one.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ckptstore.errors import CheckpointDamaged, InvalidState, UnsupportedVersion
from ckptstore.format.digest import ALGORITHMS, BLOCK_BYTES, DEFAULT, Algorithm, algorithm_of_code
from ckptstore.format.encoding import FORMAT_VERSION
from ckptstore.format.layout import check_name
from ckptstore.state.tensors.boxes import Box, Sizes
from ckptstore.state.tensors.layouts import distinct

if TYPE_CHECKING:
    import torch

PER_RANK = 1
"""The tensor differs between ranks: each rank has its own."""
BESIDE_VALUE = 2
"""The tensor belongs to a plain value, and is no key of the state."""

DTYPES: Mapping[str, tuple[int, int]] = {
    name: (code, size_bytes)
    for code, (name, size_bytes) in enumerate(
        [
            ("bool", 1), ("uint8", 1), ("int8", 1), ("int16", 2), ("int32", 4), ("int64", 8),
            ("uint16", 2), ("uint32", 4), ("uint64", 8), ("float16", 2), ("bfloat16", 2), ("float32", 4),
            ("float64", 8), ("complex32", 4), ("complex64", 8), ("complex128", 16), ("float8_e4m3fn", 1),
            ("float8_e5m2", 1), ("float8_e4m3fnuz", 1), ("float8_e5m2fnuz", 1), ("float8_e8m0fnu", 1),
            ("float4_e2m1fn_x2", 1),
        ]
    )
}  # fmt: skip
"""The format's code and the element size of each dtype, by torch's name."""
DTYPE_NAMES = tuple(DTYPES)
_ELEMENT_BYTES = np.array([size_bytes for _, size_bytes in DTYPES.values()], np.int64)


class Tensor(NamedTuple):
    """A tensor of a state, independent of the place of its bytes."""

    key: str
    dtype: str
    """torch's name without the module: "float32"."""
    shape: Sizes
    flags: int = 0
    layout: int = 0
    """The place in the layouts of an outline, counted from 1; 0 without a layout: then every rank has all of it, one
    rank has, or no rule says who has what."""
    live: str = ""
    """The dtype that it had in the state that was saved, if it is stored in another one; outlines alone know it."""

    @property
    def per_rank(self) -> bool:
        """True if it differs between ranks."""
        return bool(self.flags & PER_RANK)

    @property
    def beside_value(self) -> bool:
        """True if it belongs to a plain value, and is no key of the state."""
        return bool(self.flags & BESIDE_VALUE)

    @property
    def restored(self) -> Tensor:
        """The tensor as it was in the state that was saved."""
        return self._replace(dtype=self.live, live="") if self.live else self

    @property
    def form(self) -> tuple[str, Sizes]:
        """The fields that must be equal for one tensor to be loaded into another."""
        return self.dtype, self.shape

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of torch. Raises CheckpointDamaged if the name is that of no dtype."""
        found = _torch_dtype(self.dtype)
        if found is None:
            import torch

            raise CheckpointDamaged(f"{self.key} has the dtype {self.dtype!r}, which torch {torch.__version__} lacks")
        return found

    @property
    def size_bytes(self) -> int:
        """The bytes of all its elements."""
        return total_bytes(self.dtype, self.shape)

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


@lru_cache(maxsize=256)
def _torch_dtype(name: str) -> torch.dtype | None:
    import torch

    found = getattr(torch, name, None) if name in DTYPES else None
    return found if isinstance(found, torch.dtype) else None


@lru_cache(maxsize=65_536)
def total_bytes(dtype: str, sizes: Sizes) -> int:
    """Return the size of a tensor of torch's dtype of that name."""
    return prod(sizes) * DTYPES[dtype][1]


_WIDE = 1
"""Flag of the header: the pool's numbers have 8 bytes, not 4."""

_ALGORITHM_SHIFT = 8
"""The lowest bit of the flags that holds the code of the algorithm of the digests."""

_MAGIC = b"CKPTTIX1"
_HEADER = struct.Struct("<8s8I8Q")
MAX_ELEMENTS = 1 << 56
_MAX_TEXT_RATIO = 1100


class PartBuilder:
    """Collects the chunks that one rank wrote. Add files, and chunks within a file, in their order."""

    def __init__(self, rank: int, *, algorithm: str = DEFAULT) -> None:
        """Begin a part; `algorithm` is that of all digests of blocks."""
        self.rank = rank
        self._algorithm = ALGORITHMS[algorithm]
        self._names: dict[str, int] = {}
        self._rows: list[tuple[int, int, int, int]] = []
        self._boxes: dict[tuple[int, ...], int] = {}
        self._numbers: list[int] = []
        self._chunks: list[tuple[int, int, int]] = []
        self._files: list[tuple[str, int]] = []
        self._slabs: list[tuple[int, int, int]] = []
        self._digests: list[bytes] = []

    def add_tensor(self, fqn: str, dtype: str, shape: tuple[int, ...], flags: int = 0) -> int:
        """Return the row of a tensor; add it if there is none."""
        row = self._names.get(fqn)
        if row is None:
            if dtype not in DTYPES:
                raise InvalidState(f"{fqn} has the dtype {dtype}, which the format does not know")
            if "\0" in fqn:
                raise InvalidState(f"{fqn!r} has a NUL character in its name")
            row = self._names[fqn] = len(self._rows)
            at = self._box_at((0,) * len(shape) + shape)
            self._rows.append((DTYPES[dtype][0], len(shape), flags, at))
        return row

    def add_file(self, name: str, block_digests: Sequence[bytes]) -> None:
        """Begin a file; `block_digests` has the digests of each of its regions in turn."""
        self._files.append((name, len(self._chunks)))
        self._digests.extend(block_digests)

    def add_slab(self, offset: int, size_bytes: int) -> None:
        """Add a slab to the file that was added last."""
        self._slabs.append((len(self._files) - 1, offset, size_bytes))

    def add_chunk(self, row: int, payload_offset: int, box: Box) -> None:
        """Add a box of a tensor to the file that was added last."""
        self._chunks.append((payload_offset, row, self._box_at(box.offsets + box.sizes)))

    def _box_at(self, numbers: tuple[int, ...]) -> int:
        at = self._boxes.get(numbers)
        if at is None:
            at = self._boxes[numbers] = len(self._numbers)
            self._numbers.extend(numbers)
        return at

    def encode(self, *, common: bytes = b"", own: bytes = b"") -> bytes:
        """Return the part as bytes. `common` and `own` are JSON: the values for all ranks, and those of this rank
        alone."""
        return self.columns().encode(b"".join(self._digests), common=common, own=own)

    def columns(self) -> PartColumns:
        """Return all that was added but the digests."""
        bounds = [first for _, first in self._files] + [len(self._chunks)]
        texts = ["\0".join(self._names), "\0".join(name for name, _ in self._files)]
        raw = [text.encode("utf-8", "surrogatepass") for text in texts]
        chunks = np.array(self._chunks, np.int64).reshape(-1, 3)
        rows = np.array(self._rows, np.int64).reshape(-1, 4)
        slabs = np.array(self._slabs, np.int64).reshape(-1, 3)
        wide = max(self._numbers, default=0) >= 1 << 32
        before = [
            chunks[:, 0].astype("<u8"),
            slabs[:, 1].astype("<u8"),
            slabs[:, 2].astype("<u8"),
            np.array(self._numbers, "<u8" if wide else "<u4"),
        ]
        behind = [
            chunks[:, 1].astype("<u4"),
            chunks[:, 2].astype("<u4"),
            rows[:, 3].astype("<u4"),
            np.diff(np.array(bounds, np.int64)).astype("<u4"),
            slabs[:, 0].astype("<u4"),
            rows[:, :3].T.astype("<u1"),
        ]
        return PartColumns(
            (FORMAT_VERSION, self.rank, len(rows), len(chunks), len(self._files), len(slabs)),
            self._algorithm,
            (_WIDE if wide else 0) | self._algorithm.code << _ALGORITHM_SHIFT,
            struct.pack("<Q", len(self._numbers)) + b"".join([column.tobytes() for column in before]),
            b"".join([column.tobytes() for column in behind]),
            tuple((len(text), zlib.compress(text, 1)) for text in raw),
        )


@dataclass(frozen=True, slots=True)
class PartColumns:
    """A part without digests and plain values: the same in each save of the same structure."""

    counts: tuple[int, ...]
    algorithm: Algorithm
    flags: int
    before: bytes
    """The bytes between the header and the digests."""
    behind: bytes
    """The bytes between the digests and the texts."""
    texts: tuple[tuple[int, bytes], ...]
    """The size and the deflated bytes of the texts with names."""

    def encode(self, digests: bytes, *, common: bytes = b"", own: bytes = b"") -> bytes:
        """Return the part as bytes, with the digests of the blocks of all regions; see `PartBuilder.encode`."""
        texts = [*self.texts, *((len(text), zlib.compress(text, 1)) for text in (common, own))]
        lengths = [length for size, deflated in texts for length in (len(deflated), size)]
        num_digests = len(digests) // self.algorithm.size_bytes
        header = _HEADER.pack(_MAGIC, *self.counts, num_digests, self.flags, *lengths)
        return b"".join([header, self.before, digests, self.behind, *(deflated for _, deflated in texts)])


@dataclass(frozen=True, slots=True)
class Regions:
    """The stretches whose blocks have digests, in the order of files and offsets."""

    file: np.ndarray[Any, Any]
    offset: np.ndarray[Any, Any]
    size_bytes: np.ndarray[Any, Any]
    first_block: np.ndarray[Any, Any]
    """The place in the digests of its part at which the blocks of each region begin."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part that was read and found sound. Its arrays are views of the bytes."""

    rank: int
    names: tuple[str, ...]
    files: tuple[str, ...]
    dtype: np.ndarray[Any, Any]
    ndim: np.ndarray[Any, Any]
    flags: np.ndarray[Any, Any]
    shape_at: np.ndarray[Any, Any]
    """The place in `numbers` at which the offsets (zeros) and the shape of each tensor begin."""
    numbers: np.ndarray[Any, Any]
    chunk_tensor: np.ndarray[Any, Any]
    chunk_file: np.ndarray[Any, Any]
    chunk_offset: np.ndarray[Any, Any]
    chunk_bytes: np.ndarray[Any, Any]
    chunk_box: np.ndarray[Any, Any]
    """The place in `numbers` at which the offsets and sizes of each chunk begin."""
    chunk_region: np.ndarray[Any, Any]
    regions: Regions
    algorithm: str
    digests: memoryview
    """The digests of all blocks, by that algorithm."""
    common: bytes
    """The JSON of the values that are for all ranks."""
    own: bytes
    """The JSON of the values that are this rank's alone."""

    def layout(self) -> list[bytes]:
        """Return the places of all boxes: equal for parts that differ in digests and plain values alone."""
        texts = ["\0".join(self.names), "\0".join(self.files), str(self.rank)]
        columns = [self.dtype, self.ndim, self.flags, self.shape_at, self.numbers, self.chunk_tensor, self.chunk_file]
        columns += [self.chunk_offset, self.chunk_box]
        named = [text.encode("utf-8", "surrogatepass") for text in texts]
        return named + [column.dtype.str.encode() + column.tobytes() for column in columns]

    @staticmethod
    def decode(data: bytes | memoryview, *, rank: int, file: str) -> Part:
        """Read the part of a rank, without trust. Raises CheckpointDamaged, or UnsupportedVersion."""
        try:
            part = _decode(memoryview(data), file)
        except (struct.error, ValueError, IndexError, zlib.error, OverflowError) as error:
            raise CheckpointDamaged(f"{file} is not a tensor index: {error}", file=file) from None
        if part.rank != rank:
            raise CheckpointDamaged(f"{file} has the part of rank {part.rank} in the place of rank {rank}", file=file)
        return part


_name_tables: dict[tuple[bytes, int], tuple[str, ...]] = {}


def _names_of(deflated: bytes, raw_bytes: int, count: int) -> tuple[str, ...]:
    """Return the names of a table. Ranks mostly have the same one, so the last few are kept, by their number too: the
    bytes of no name are those of one that is empty."""
    names = _name_tables.get((deflated, count))
    if names is None:
        text = inflated(deflated, raw_bytes).decode("utf-8", "surrogatepass")
        names = tuple(text.split("\0")) if count else ()
        if len(_name_tables) > 8:
            _name_tables.clear()
        _name_tables[deflated, count] = names
    if len(names) != count or len(set(names)) != count:
        raise ValueError("the number of names is wrong")
    return names


def inflated(deflated: bytes | memoryview, size_bytes: int) -> bytes:
    """Return a text of that size from its deflated form. Raises ValueError, zlib.error."""
    if size_bytes > len(deflated) * _MAX_TEXT_RATIO:
        raise ValueError("a text is longer than its deflated form allows")
    stream = zlib.decompressobj()
    text = stream.decompress(deflated, size_bytes + 1)
    if len(text) != size_bytes or not stream.eof or stream.unused_data:
        raise ValueError("the length of a text is wrong")
    return text


def _decode(data: memoryview, file: str) -> Part:
    magic, version, rank, tensors, chunks, files, slabs, blocks, header_flags, *lengths = _HEADER.unpack_from(data, 0)
    if magic != _MAGIC:
        raise ValueError("it begins with something else")
    if version > FORMAT_VERSION:
        raise UnsupportedVersion(f"{file} has a tensor index of version {version}", file=file, hint="Upgrade ckptstore")
    _require(version > 0, "it has version 0, which is none")
    (numbers_count,) = struct.unpack_from("<Q", data, _HEADER.size)
    at = _HEADER.size + 8

    def column(kind: str, count: int) -> np.ndarray[Any, Any]:
        nonlocal at
        found = np.frombuffer(data, kind, count, at) if count else np.zeros(0, kind)
        at += found.nbytes
        return found

    chunk_offset, slab_offset, slab_bytes = column("<i8", chunks), column("<i8", slabs), column("<i8", slabs)
    numbers = column("<i8" if header_flags & _WIDE else "<u4", numbers_count)
    algorithm = algorithm_of_code(header_flags >> _ALGORITHM_SHIFT, file=file)
    digests = column("u1", ALGORITHMS[algorithm].size_bytes * blocks)
    chunk_tensor, chunk_box = column("<u4", chunks), column("<u4", chunks)
    shape_at, file_chunks, slab_file = column("<u4", tensors), column("<u4", files), column("<u4", slabs)
    dtype, ndim, flags = column("u1", 3 * tensors).reshape(3, -1)
    texts: list[bytes] = []
    for length in lengths[::2]:
        texts.append(bytes(data[at : at + length]))
        at += length
    if at != len(data):
        raise ValueError(f"it has {len(data)} bytes, {at} belong to it")
    names = _names_of(texts[0], lengths[1], tensors)
    file_names = tuple(map(check_name, _names_of(texts[1], lengths[3], files)))

    _require(bool((dtype < len(DTYPES)).all()), "a dtype is unknown")
    _require(int(file_chunks.sum(dtype=np.int64)) == chunks, "the chunks of its files are not all its chunks")
    _require(not chunks or int(chunk_tensor.max()) < tensors, "a chunk is of no tensor")
    chunk_file = np.repeat(np.arange(files), file_chunks)
    volumes = _volumes(numbers, ndim, shape_at, chunk_tensor, chunk_box)
    chunk_bytes = volumes * _ELEMENT_BYTES[dtype[chunk_tensor]]
    regions, num_blocks = _regions(chunk_file, chunk_offset, chunk_bytes, (slab_file, slab_offset, slab_bytes), files)
    _require(num_blocks == blocks, "it has not one digest for each block")
    return Part(
        rank=rank,
        names=names,
        files=file_names,
        dtype=dtype,
        ndim=ndim,
        flags=flags,
        shape_at=shape_at,
        numbers=numbers,
        chunk_tensor=chunk_tensor,
        chunk_file=chunk_file,
        chunk_offset=chunk_offset,
        chunk_bytes=chunk_bytes,
        chunk_box=chunk_box,
        chunk_region=_region_of_chunks(regions, chunk_file, chunk_offset, chunk_bytes),
        regions=regions,
        algorithm=algorithm,
        digests=digests.data,
        common=inflated(texts[2], lengths[5]),
        own=inflated(texts[3], lengths[7]),
    )


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ValueError(otherwise)


def _volumes(numbers: Any, ndim: Any, shape_at: Any, chunk_tensor: Any, chunk_box: Any) -> Any:
    """Return the number of elements of each chunk; raise ValueError when a box leaves its tensor."""
    volumes = np.ones(len(chunk_tensor), np.int64)
    chunk_ndim = ndim[chunk_tensor]
    for dims in distinct(ndim):
        place = np.arange(2 * int(dims))
        shapes = numbers[shape_at[ndim == dims].astype(np.int64)[:, None] + place].astype(np.int64)
        here = chunk_ndim == dims
        boxes = numbers[chunk_box[here].astype(np.int64)[:, None] + place].astype(np.int64)
        offsets, sizes = boxes[:, : int(dims)], boxes[:, int(dims) :]
        limits = numbers[shape_at[chunk_tensor[here]].astype(np.int64)[:, None] + place[int(dims) :]].astype(np.int64)
        _require(bool((shapes >= 0).all() and (boxes >= 0).all()), "a number is negative")
        _require(bool((np.prod(shapes[:, int(dims) :].astype(float), axis=1) < MAX_ELEMENTS).all()), "a tensor is huge")
        _require(bool((offsets <= limits).all() and (sizes <= limits - offsets).all()), "a chunk leaves its tensor")
        volumes[here] = sizes.prod(axis=1)
    return volumes


def _regions(
    chunk_file: Any, chunk_offset: Any, chunk_bytes: Any, slabs: tuple[Any, Any, Any], files: int
) -> tuple[Regions, int]:
    """Return the regions, which are the slabs and every large payload, with the number of their blocks."""
    large = chunk_bytes >= BLOCK_BYTES
    file = np.concatenate([chunk_file[large], slabs[0].astype(np.int64)])
    offset = np.concatenate([chunk_offset[large], slabs[1]])
    size = np.concatenate([chunk_bytes[large], slabs[2]])
    _require(bool((offset >= 0).all() and (size > 0).all() and (size < MAX_ELEMENTS).all()), "a region has no size")
    _require(not len(file) or int(file.max()) < files, "a slab is of no file")
    order = np.lexsort((size, offset, file))
    file, offset, size = file[order], offset[order], size[order]
    if len(order) > 1:  # tied tensors share a payload
        differs = (np.diff(file) != 0) | (np.diff(offset) != 0) | (np.diff(size) != 0)
        first = np.concatenate([[True], differs])
        file, offset, size = file[first], offset[first], size[first]
        apart = (np.diff(file) > 0) | (offset[1:] >= offset[:-1] + size[:-1])
        _require(bool(apart.all()), "its regions overlap")
    blocks = np.concatenate([[0], np.cumsum(-(-size // BLOCK_BYTES))])
    return Regions(file, offset, size, blocks[:-1]), int(blocks[-1])


def _region_of_chunks(regions: Regions, chunk_file: Any, chunk_offset: Any, chunk_bytes: Any) -> Any:
    """Return the region of each chunk: the last one that begins at or before it."""
    found = np.full(len(chunk_file), -1, np.int64)
    numbers = distinct(chunk_file)
    lows, highs = np.searchsorted(regions.file, numbers), np.searchsorted(regions.file, numbers, "right")
    for number, low, high in zip(numbers, lows, highs, strict=True):
        here = chunk_file == number
        place = np.searchsorted(regions.offset[low:high], chunk_offset[here], "right") - 1
        _require(bool((place >= 0).all()), "a chunk lies in no region")
        found[here] = low + place
    ends = regions.offset[found] + regions.size_bytes[found] if len(found) else found
    _require(bool((chunk_offset + chunk_bytes <= ends).all()), "a chunk leaves its region")
    return found
