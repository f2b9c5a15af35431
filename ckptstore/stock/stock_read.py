"""Reading of checkpoints of stock DCP: `.metadata` through an unpickler that knows its classes and no others.

Payloads are found by parsing the archive around each tensor. A tensor that is contiguous and alone in its frame is read
straight into memory; for any other, and for small ones, `torch.load(weights_only=True)` reads the whole frame. Plain
values are read the same way. Stock files carry no digests that could be checked.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple

import torch

from ckptstore.errors import CheckpointDamaged, CkptstoreError, InvalidState, StateMismatch
from ckptstore.format.digest import BLOCK_BYTES
from ckptstore.format.encoding import shortened
from ckptstore.format.layout import DCP_METADATA_NAME, check_name
from ckptstore.state.index.part import DTYPES, Part, PartBuilder
from ckptstore.state.index.tensor_index import TensorIndex
from ckptstore.state.live.matching import Saved, Target
from ckptstore.state.read.read_plan import Read, ReadPlan, RunSteps, Step, run_steps
from ckptstore.state.tensors import frames
from ckptstore.state.tensors.boxes import Box, inside, overlap
from ckptstore.state.tensors.placement import PLAIN_TYPES, Piece, dtype_and_shape, pieces_of
from ckptstore.state.tensors.segments import narrowed
from ckptstore.state.tensors.tensor_memory import check_memory
from ckptstore.stock.stock_pickles import is_contiguous_frame
from ckptstore.transfer import RangeRead

SMALL_FRAME_BYTES = 64 << 10
_GROUP = re.compile(r"(?:.*\.)?param_groups\.\d+\..+")
_MEMBERS = re.compile(r"(?:.*\.)?param_groups\.\d+\.params")
_HEAD_BYTES = 4 << 10
_TAIL_BYTES = 2 << 10


class _Frame(NamedTuple):
    """The place of an item."""

    file: str
    offset: int
    size_bytes: int


_Job = tuple[str, Box, Box, torch.Tensor]
"""A part of a tensor that is filled from a frame which torch reads: the tensor's key, the part, counted from the chunk
in the frame, the chunk, and the memory."""


@dataclass(slots=True)
class StockState:
    """A stock DCP checkpoint, as one rank reads it. Has the methods of `StoredState` that a load needs."""

    metadata: Any
    read: Read
    prefix: str
    sizes_bytes: Mapping[str, int]
    """The sizes of all files of the checkpoint, by name."""
    allow_pickle: bool = False
    buffer_bytes: int = 256 << 20
    index: TensorIndex = field(init=False)
    paths: Mapping[str, tuple[Any, ...]] = field(init=False)
    """The path of each key in the state, as DCP flattened it."""
    _values: dict[str, _Frame] = field(init=False, default_factory=dict)
    _opaque: dict[tuple[str, int], _Frame] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        try:
            planner = self.metadata.planner_data
            self.paths = {key: tuple(path) for key, path in planner.items()} if isinstance(planner, dict) else {}
            self.index = self._build_index()
        except CkptstoreError:
            raise
        except Exception as error:  # the contents of a pickle may be of any type, and lack anything
            raise CheckpointDamaged(
                f"{DCP_METADATA_NAME} is not what stock DCP writes: {error!r}", file=DCP_METADATA_NAME
            ) from None

    def whole_index(self) -> TensorIndex:
        """Return the index; see `StoredState.whole_index`."""
        return self.index

    def all_keys(self) -> set[str]:
        """Return the keys of tensors and of plain values."""
        return {*self.index.tensors, *self.index.aliases, *self._values}

    def values(self, wanted: Callable[[str], bool] = lambda key: True) -> dict[str, Any]:
        """Return the plain values whose keys are wanted.

        Raises InvalidState, with the key, for a value that needs code to be read, unless `allow_pickle` is set.
        """
        found = {}
        keys = [key for key in self._values if wanted(key)]
        for key, data in zip(keys, self._read_ranges([self._values[key] for key in keys]), strict=True):
            try:
                found[key] = torch.load(io.BytesIO(data), map_location="cpu", weights_only=not self.allow_pickle)
            except Exception as error:  # torch raises many kinds here
                raise _unsafe(key, error) from None
        return found

    def saved(self, wanted: Callable[[str], bool] = lambda key: True) -> Saved:
        """Return the contents of the checkpoint, with the plain values whose keys are wanted; the same for every rank.

        Groups of an optimizer's parameters that are numbered come under the names of their parameters.
        """
        found = self.values(lambda key: wanted(key) or _GROUP.fullmatch(key) is not None)
        return Saved(self.index.tensors, {key: value for key, value in by_parameter(found).items() if wanted(key)})

    def fill(self, targets: Mapping[str, tuple[torch.Tensor, str] | Target], *, run: RunSteps = run_steps) -> None:
        """Read tensors into memory, as `StoredState.fill` does; nothing is checked against digests."""
        for name, (tensor, source, *_) in targets.items():
            entry, (dtype, shape) = self.index.tensors.get(source), dtype_and_shape(tensor)
            if entry is None or (entry.torch_dtype, entry.shape) != (dtype, shape):
                has = f"{entry.dtype} {entry.shape}" if entry else "nothing"
                raise StateMismatch(f"{name} is {dtype} {shape}, the checkpoint has {has}")
        self._fill([(source, pieces_of(tensor, name)) for name, (tensor, source, *_) in targets.items()], run)

    def fill_boxes(self, wanted: Sequence[tuple[str, Box, torch.Tensor]]) -> None:
        """Read boxes of stored tensors, each into memory of its shape and dtype."""
        self._fill([(key, [Piece(box, memory)]) for key, box, memory in wanted])

    def _fill(self, wanted: Sequence[tuple[str, list[Piece]]], run: RunSteps = run_steps) -> None:
        with torch.inference_mode():  # in which all tensors may be written to, inference tensors too
            run(self._steps(wanted), self.read, self.buffer_bytes)

    def _steps(self, wanted: Sequence[tuple[str, list[Piece]]]) -> Iterator[Step]:
        """Yield the steps of a read, and load the frames that torch has to read: where `run` is prepared for errors."""
        plan = _StockReadPlan(self.index, self._opaque, prefix=self.prefix)
        for source, pieces in wanted:
            for piece in pieces:
                check_memory(piece.tensor, source)
            plan.add(source, pieces, rank=0)
        yield from plan.steps()
        for frame, jobs in plan.whole_frames.items():
            self._load_frame(frame, jobs)

    def _load_frame(self, frame: _Frame, jobs: Sequence[_Job]) -> None:
        (data,) = self._read_ranges([frame])
        key = jobs[0][0]
        try:
            loaded = torch.load(io.BytesIO(data), map_location="cpu", weights_only=not self.allow_pickle)
        except Exception as error:  # torch raises many kinds here
            if isinstance(error, pickle.UnpicklingError) and not self.allow_pickle:
                raise _unsafe(key, error) from None
            raise CheckpointDamaged(
                f"{frame.file} has a tensor that cannot be read, {key}: {error}", file=frame.file
            ) from None
        if type(loaded) not in PLAIN_TYPES:
            raise InvalidState(
                f"{key} was stored as {type(loaded).__name__}, of which torch's DCP does not say what it is made of",
                hint="Load without it, or with torch's own reader",
            )
        for key, box, chunk, target in jobs:
            if tuple(loaded.shape) != chunk.sizes:
                raise CheckpointDamaged(
                    f"{frame.file} has {tuple(loaded.shape)} of {key} for {chunk.sizes}", file=frame.file
                )
            target.copy_(narrowed(loaded.detach(), box))

    def _read_ranges(self, ranges: Sequence[tuple[str, int, int]]) -> list[bytearray]:
        buffers = [bytearray(size_bytes) for _, _, size_bytes in ranges]
        self.read(
            [
                RangeRead(self.prefix + file, offset, (memoryview(buffer),))
                for (file, offset, _), buffer in zip(ranges, buffers, strict=True)
                if buffer
            ]
        )
        return buffers

    def _build_index(self) -> TensorIndex:
        """Return the index with the place of every chunk's payload, or of its whole frame."""
        placed: list[tuple[_Frame, str, Box]] = []
        for item, place in self.metadata.storage_data.items():
            entry = self.metadata.state_dict_metadata.get(item.fqn)
            frame = self._frame(item.fqn, place)
            if not hasattr(entry, "chunks"):
                self._values[item.fqn] = frame
                continue
            offset = tuple(item.offset or ())
            sizes = next((tuple(chunk.sizes) for chunk in entry.chunks if tuple(chunk.offsets) == offset), None)
            if sizes is None:
                raise CheckpointDamaged(f"{DCP_METADATA_NAME} has no chunk of {item.fqn} at {offset}")
            placed.append((frame, item.fqn, Box(offset, sizes)))
        placed.sort(key=lambda each: each[0])
        payloads = self._payloads(placed)
        builder = PartBuilder(0)
        for file, group in groupby(zip(placed, payloads, strict=True), key=lambda each: each[0][0].file):
            self._add_file(builder, file, [(*item, payload) for item, payload in group if item[2].volume])
        for fqn in self.metadata.state_dict_metadata:
            self._row(builder, fqn)
        return TensorIndex([Part.decode(builder.encode(), rank=0, file=DCP_METADATA_NAME)])

    def _add_file(
        self, builder: PartBuilder, file: str, chunks: Sequence[tuple[_Frame, str, Box, tuple[int, int] | None]]
    ) -> None:
        """Add the chunks of one file."""
        regions, places = [], dict[tuple[_Frame, int], int]()
        end = self.sizes_bytes[file]
        for frame, fqn, box, payload in chunks:
            chunk_bytes = box.volume * DTYPES.get(self._dtype(fqn), (0, 1))[1]
            if payload is None and (frame, chunk_bytes) not in places:
                # The frame may be smaller or larger than the chunk, as a planner that casts leaves it. So the index
                # has the chunk in a place behind the end of the file; tied tensors have one place.
                self._opaque[file, end], places[frame, chunk_bytes] = frame, end
                end += chunk_bytes
            offset = places[frame, chunk_bytes] if payload is None else payload[0]
            regions.append((offset, chunk_bytes, chunk_bytes < BLOCK_BYTES))
        distinct = dict.fromkeys(regions)  # tied tensors may share a payload
        # The index wants digests of regions; these zeros stand for none and are never compared.
        builder.add_file(file, [bytes(4 * -(-size_bytes // BLOCK_BYTES)) for _, size_bytes, _ in distinct])
        for offset, size_bytes, is_small in distinct:
            if is_small:
                builder.add_slab(offset, size_bytes)
        for (offset, _, _), (_, fqn, box, _) in zip(regions, chunks, strict=True):
            builder.add_chunk(self._row(builder, fqn), offset, box)

    def _row(self, builder: PartBuilder, fqn: str) -> int:
        entry = self.metadata.state_dict_metadata[fqn]
        if not hasattr(entry, "chunks"):
            return -1
        return builder.add_tensor(fqn, self._dtype(fqn), tuple(entry.size))

    def _dtype(self, fqn: str) -> str:
        return str(self.metadata.state_dict_metadata[fqn].properties.dtype).removeprefix("torch.")

    def _frame(self, fqn: str, place: Any) -> _Frame:
        if getattr(place, "transform_descriptors", None):
            raise InvalidState(
                f"{fqn} was written through {list(place.transform_descriptors)}, which ckptstore cannot undo",
                hint="Load it with torch and save it again",
            )
        name = check_name(str(place.relative_path))
        size_bytes = self.sizes_bytes.get(name)
        if size_bytes is None:
            raise CheckpointDamaged(f"{name} is missing, it holds {fqn}", file=name)
        frame = _Frame(name, int(place.offset), int(place.length))
        if frame.offset < 0 or frame.size_bytes <= 0 or frame.offset + frame.size_bytes > size_bytes:
            raise CheckpointDamaged(f"{name} has {size_bytes} bytes, and {fqn} lies beyond its end", file=name)
        return frame

    def _payloads(self, placed: Sequence[tuple[_Frame, str, Box]]) -> list[tuple[int, int] | None]:
        """Return offset and size of each payload that can be read directly, None for a frame that torch has to read."""
        found: list[tuple[int, int] | None] = [None] * len(placed)
        large = [number for number, (frame, _, _) in enumerate(placed) if frame.size_bytes > SMALL_FRAME_BYTES]
        frames_ = [placed[number][0] for number in large]
        heads = self._read_ranges([(frame.file, frame.offset, _HEAD_BYTES) for frame in frames_])
        ends = [frame.offset + frame.size_bytes for frame in frames_]
        tails = self._read_ranges(
            [(frame.file, end - _TAIL_BYTES, _TAIL_BYTES) for frame, end in zip(frames_, ends, strict=True)]
        )
        located = []
        for number, frame, head, tail in zip(large, frames_, heads, tails, strict=True):
            _, fqn, box = placed[number]
            header, size_bytes, is_plain = frames.payload_range(bytes(tail), frame.size_bytes, file=frame.file)
            element_bytes = DTYPES.get(self._dtype(fqn), (0, 0))[1]
            is_whole = size_bytes == box.volume * element_bytes
            if is_plain and is_whole and is_contiguous_frame(bytes(head), box, self._dtype(fqn)):
                located.append((number, frame, header, size_bytes))
        headers = self._read_ranges([(frame.file, frame.offset + header, 30) for _, frame, header, _ in located])
        for (number, frame, header, size_bytes), data in zip(located, headers, strict=True):
            offset = frames.payload_offset(bytes(data), header, file=frame.file)
            if offset + size_bytes <= frame.size_bytes:
                found[number] = frame.offset + offset, size_bytes
        return found


class _StockReadPlan(ReadPlan):
    """A read plan that keeps apart the frames that torch has to read."""

    def __init__(self, index: TensorIndex, opaque: Mapping[tuple[str, int], _Frame], *, prefix: str) -> None:
        super().__init__(index, prefix=prefix, checked=False)
        self._opaque = opaque
        self.whole_frames: dict[_Frame, list[_Job]] = {}

    def add(self, source: str, pieces: Any, *, rank: int) -> None:
        """Fill these pieces of the stored tensor `source`."""
        plain: list[Piece] = []
        for piece in pieces:
            chunks = self._index.chunks(source, rank, piece.box)
            framed = [self._opaque.get((self._index.files[chunk.file], chunk.offset)) for chunk in chunks]
            if not any(framed):
                plain.append(piece)
                continue
            for chunk, frame in zip(chunks, framed, strict=True):
                common = overlap(chunk.box, piece.box)
                if common is None:
                    continue
                target = narrowed(piece.tensor, inside(common, piece.box))
                if frame is None:
                    plain.append(Piece(common, target))
                else:
                    job = source, inside(common, chunk.box), chunk.box, target
                    self.whole_frames.setdefault(frame, []).append(job)
        super().add(source, plain, rank=rank)


def _unsafe(key: str, error: Exception) -> InvalidState:
    return InvalidState(
        f"the value of {key} cannot be read safely: {error}",
        hint="Load without it, or pass allow_pickle=True if you trust who wrote the checkpoint",
    )


def by_parameter(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the same values with `x.param_groups.0.lr` as `x.param_groups.<parameter>.lr` for each parameter of the
    group: the names that do not depend on how parameters were grouped. Groups that list their parameters by number, as
    an optimizer's own `state_dict` does, stay as they are."""
    keys: list[Any] = list(values)  # as somebody wrote them
    odd = [key for key in keys if not isinstance(key, str)]
    if odd:
        raise CheckpointDamaged(f"a key of {DCP_METADATA_NAME} is {shortened(repr(odd[0]))}, and no text")
    found = dict(values)
    members = {key.removesuffix(".params"): value for key, value in values.items() if _MEMBERS.fullmatch(key)}
    numbered = {group.rpartition(".")[0] for group, names in members.items() if not _are_names(names)}
    for group, names in members.items():
        prefix = group.rpartition(".")[0]
        if prefix in numbered:
            continue
        options = [key.removeprefix(f"{group}.") for key in values if key.startswith(f"{group}.")]
        for option in options:
            value = found.pop(f"{group}.{option}")
            if option != "params":
                found.update({f"{prefix}.{name}.{option}": value for name in names})
    return found


def _are_names(members: Any) -> bool:
    return isinstance(members, list | tuple) and all(isinstance(name, str) for name in members)
