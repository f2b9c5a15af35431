"""One rank's files of a state checkpoint: the place of each frame, the sources for the transfer, and the index; and the
check that a staged copy of them is what the tensors are.

Small tensors lie in a slab at the start of the first file, one frame after another. Each larger one has its payload at
a multiple of 4,096, so that it can be mapped and read directly. A rank writes several files when there is much to
write: threads that write one file on a disk wait for each other.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import accumulate, chain, count
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from ckptstore.errors import CkptstoreError
from ckptstore.format.digest import BLOCK_BYTES, DEFAULT, Digest, fingerprint
from ckptstore.format.manifest import Receipt
from ckptstore.format.naming import spread_directory
from ckptstore.runtime.collector import collector_paused
from ckptstore.state.index.part import PartBuilder, PartColumns
from ckptstore.state.tensors.boxes import Box, inside
from ckptstore.state.tensors.frames import Template, template
from ckptstore.state.tensors.layouts import distinct
from ckptstore.state.tensors.placement import PLAIN_TYPES
from ckptstore.state.tensors.segments import (
    Bytes,
    Segment,
    SegmentSource,
    Slab,
    SlabLayout,
    bits_of,
    check_range,
    narrowed,
    payload_segment,
)
from ckptstore.state.tensors.tensor_memory import digest_of, is_plain_memory
from ckptstore.state.write.assignment import RankPlan
from ckptstore.state.write.describe import Described
from ckptstore.state.write.incremental import Kept, KeptChunk, KeptFile, Place
from ckptstore.state.write.outlining import RankTold
from ckptstore.transfer import Stored

ALIGN_BYTES = 4096
FILE_BYTES = 4 << 30
"""The most bytes that are planned for a file, unless one chunk is larger."""
SHARED_FILE_BYTES = 256 << 20
"""The least bytes for each file from which a rank writes several files at once."""
LOCAL_SHARED_FILE_BYTES = 64 << 20
"""The same on a disk, which takes bytes for one file from one thread at a time."""
_SAMPLED_BYTES = 512 << 20
"""The bytes of large tensors for which one more tensor is sampled."""
_SMALL = 4
"""The number of tensors in slabs that are sampled."""
_RUN = 4
"""The length of the runs in which elements are picked: at both ends, and in between."""
_RUNS = 2

_Frame = tuple[str, Box, Template, torch.Tensor]
_T = TypeVar("_T")


class Placed(NamedTuple):
    """A box of a tensor, and the place of its payload in a file."""

    key: str
    box: Box
    offset: int
    size_bytes: int
    tensor: torch.Tensor
    cast: torch.dtype | None = None
    """The dtype in which it is stored; None if that is its own."""


class SmallPlaced(Sequence[Placed]):
    """The small tensors of a slab; each is made when it is looked at."""

    def __init__(self, layout: SlabLayout, keys: Sequence[str], boxes: Sequence[Box], tensors: Sequence[torch.Tensor]):
        self.layout, self.keys, self.boxes, self.tensors = layout, keys, boxes, tensors

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, number: Any) -> Any:
        offset, size_bytes = self.layout.payload_offsets[number], self.layout.payload_sizes[number]
        return Placed(self.keys[number], self.boxes[number], offset, size_bytes, self.tensors[number])


@dataclass(slots=True)
class ShardFile:
    """One file, before it is written."""

    name: str
    segments: list[Segment] = field(default_factory=list)
    regions: list[tuple[int, int]] = field(default_factory=list)
    placed: list[Placed] = field(default_factory=list)
    """The large tensors."""
    small: SmallPlaced | None = None
    slab_bytes: int = 0
    size_bytes: int = 0

    def add(self, segment: Segment) -> None:
        self.segments.append(segment)
        self.size_bytes += segment.size_bytes

    def add_bytes(self, data: bytes | memoryview) -> None:
        self.add(Bytes(memoryview(data)))

    def add_slab(self, small: SmallPlaced, addresses: Sequence[int]) -> None:
        """Begin the file with small tensors; see `Slab` for the addresses."""
        self.small = small
        self.slab_bytes = small.layout.size_bytes
        self.regions.append((0, self.slab_bytes))
        self.add(Slab(small.layout, small.tensors, addresses))

    @property
    def all_placed(self) -> Iterator[Placed]:
        """All tensors, in their order."""
        return chain(self.small or (), self.placed)

    def add_large(
        self, key: str, box: Box, made: Template, tensor: torch.Tensor, cast: torch.dtype | None = None
    ) -> None:
        """Add one tensor, with its payload aligned, in the dtype `cast` if there is one."""
        gap = -(self.size_bytes + len(made.header)) % ALIGN_BYTES
        self.add_bytes(bytes(gap) + made.header)
        self.placed.append(Placed(key, box, self.size_bytes, made.payload_bytes, tensor, cast))
        self.regions.append((self.size_bytes, made.payload_bytes))
        self.add(payload_segment(tensor, cast, key))
        self.add_bytes(made.trailer)


class Striping(NamedTuple):
    """The number of files and directories over which the bytes of a rank are spread."""

    num_files: int = 1
    """The most files that a rank writes at once."""
    num_prefixes: int = 1
    """The directories that share the files of all ranks."""
    on_disk: bool = False
    """True for a disk, which takes bytes for one file from one thread at a time."""
    apart: tuple[str, ...] = ()
    """The patterns of keys that thinning may drop: those that fit the same ones get files of their own."""
    mark: str = ""
    """The end of the names of all files, where other saves may write to the same directory."""


class ShardFiles:
    """The files that one rank writes."""

    @collector_paused()
    def __init__(
        self,
        described: Described,
        plan: RankPlan,
        *,
        rank: int,
        striping: Striping,
        incremental: bool = False,
        before: Kept | None = None,
        algorithm: str = DEFAULT,
    ) -> None:
        """Lay out the files. With `incremental` the chunks get digests, and files of the checkpoint `before` are taken
        over. `algorithm` is that of the digests."""
        self._described = described
        self._plan = plan
        self._rank = rank
        self._directory, self._mark = spread_directory(rank, striping.num_prefixes), striping.mark
        self._algorithm = algorithm
        self._digests: dict[Place, str] = {}
        self.kept: list[KeptFile] = []
        """Files of the checkpoint before that are taken over, with those of their chunks that are still current."""
        frames = self._frames()
        if incremental:
            self._digests = {(key, box): self._digest_of(key, tensor) for key, box, _, tensor in frames}
            self.kept = before.still_good(self._digests, algorithm=algorithm) if before else []
        held = {(chunk.key, chunk.box) for file in self.kept for chunk in file.chunks}
        frames = [frame for frame in frames if frame[:2] not in held] if held else frames
        self.files: list[ShardFile] = []
        groups: dict[tuple[str, ...], list[_Frame]] = {(): [] if striping.apart else frames}
        fits = self._plan.derive("apart", striping.apart, lambda: self._fits(striping.apart)) if striping.apart else {}
        for frame in frames if fits else ():
            groups.setdefault(fits[frame[0]], []).append(frame)
        for fit in sorted(groups, reverse=True):
            self._num_apart = len(self.files)
            self._lay_out(groups[fit], striping)

    def _fits(self, patterns: Sequence[str]) -> dict[str, tuple[str, ...]]:
        """Return the patterns by which thinning drops each tensor, with all that is tied to it, or with its value."""
        owners = {item.key: item.owner for item in self._described.items}

        def fits(key: str, pattern: str) -> bool:
            above = [it for it in accumulate(key.split("."), "{}.{}".format) if it in self._described.values]
            return any(fnmatchcase(name, pattern) for name in (owners[key] or key, *above))

        return {
            key: tuple(one for one in patterns if all(fits(it, one) for it in (key, *self._plan.ties.get(key, ()))))
            for key in self._described.memory
        }

    def _lay_out(self, frames: Sequence[_Frame], striping: Striping) -> None:
        """Add files with these frames."""
        shared_bytes = LOCAL_SHARED_FILE_BYTES if striping.on_disk else SHARED_FILE_BYTES
        size_bytes = sum([made.size_bytes for _, _, made, _ in frames])
        files = self._new_files(_num_files(size_bytes, striping.num_files, shared_bytes))
        self.files += files
        small = [frame for frame in frames if frame[2].payload_bytes < BLOCK_BYTES]
        large = [frame for frame in frames if frame[2].payload_bytes >= BLOCK_BYTES]
        if small:
            files[0].add_slab(*self._slab(small))
        share = -(-sum(made.size_bytes for _, _, made, _ in large) // max(1, len(files)))
        at, filled = 0, 0
        for frame in large:
            frame_bytes = frame[2].size_bytes
            if filled + frame_bytes // 2 > share and at + 1 < len(files):
                at, filled = at + 1, 0
            key, box, made, tensor = frame
            cast = self._described.casts.get(key)
            if cast is not None and (tensor.is_neg() or not tensor.is_contiguous()):
                tensor, cast = cast_now(key, tensor, cast), None  # others are cast later, stretch by stretch
            files[at].add_large(key, box, made, tensor, cast)
            filled += frame_bytes

    def _digest_of(self, key: str, tensor: torch.Tensor) -> str:
        """Return the fingerprint of the payload, which for a cast tensor follows from its own and the dtype."""
        digest, cast = digest_of(tensor), self._described.casts.get(key)
        return digest if cast is None else fingerprint(f"{digest} {cast}".encode()).hex()

    def _new_files(self, num_files: int) -> list[ShardFile]:
        taken = {file.receipt.name for file in self.kept}.union(file.name for file in self.files)
        begin = f"{self._directory}state-rank={self._rank:05d}"
        names = (f"{begin}-{number:02d}{self._mark}.distcp" for number in count())
        free = (name for name in names if name not in taken)
        return [ShardFile(next(free)) for _ in range(num_files)]

    def _frames(self) -> list[_Frame]:
        items, memory, casts = self._described.items, self._described.memory, self._described.casts

        def make() -> list[tuple[str, int, Box, Box | None, Template]]:
            found = []
            for number, place, box in self._plan.writes:
                item = items[number]
                part = None if box == item.boxes[place] else inside(box, item.boxes[place])
                dtype = casts.get(item.key, memory[item.key][place].dtype)
                found.append((item.key, place, box, part, template(dtype, box.sizes)))
            return found

        return [
            (key, box, made, memory[key][place] if part is None else narrowed(memory[key][place], part))
            for key, place, box, part, made in self._plan.derive("frames", None, make)
        ]

    def _slab(self, frames: Sequence[_Frame]) -> tuple[SmallPlaced, list[int]]:
        """Return the small tensors in their places, and their addresses, 0 for those that are not dense."""
        keys, boxes, templates, tensors = zip(*frames, strict=True)
        if casts := self._described.casts:
            tensors = tuple(
                [cast_now(key, it, casts[key]) if key in casts else it for key, it in zip(keys, tensors, strict=True)]
            )
        layout = self._plan.derive("slab", templates, lambda: SlabLayout(templates))
        dense = self._described.dense
        addresses = [
            one.address if (one := dense.get(key)) is not None and box is one.form.boxes[0] else 0
            for key, box in zip(keys, boxes, strict=True)
        ]
        return SmallPlaced(layout, keys, boxes, tensors), addresses

    def add_frames(self, frames: Mapping[str, bytes]) -> dict[str, tuple[str, int, int]]:
        """Add further bytes behind the tensors of the last file that thinning keeps, equal ones once. Return for each
        name the file, the offset and the length."""
        if not frames:
            return {}
        if len(self.files) == self._num_apart:
            self.files += self._new_files(1)
        file, known = self.files[-1], dict[bytes, int]()
        for frame in frames.values():
            if frame not in known:
                known[frame] = file.size_bytes
                file.add_bytes(frame)
        return {name: (file.name, known[frame], len(frame)) for name, frame in frames.items()}

    def sources(self) -> list[tuple[str, SegmentSource]]:
        return [(file.name, SegmentSource(file.segments, file.regions)) for file in self.files]

    def copy_check(self, *, turn: int, every: bool) -> CopyCheck:
        large: list[tuple[int, Placed]] = []
        for number, file in enumerate(self.files):
            large += [(number, placed) for placed in file.placed]
        slabs = [(number, file.small) for number, file in enumerate(self.files) if file.small]
        return CopyCheck(large, slabs, turn=turn, every=every)

    @collector_paused()
    def index_part(self, block_digests: Sequence[Sequence[bytes]]) -> bytes:
        """Return this rank's part of the tensor index, from the digests of each file's regions."""
        digests = [*chain(*(file.region_digests for file in self.kept), *block_digests)]
        made_for: list[Any] = [self._algorithm]
        for file in self.files:
            made_for += file.name, file.small and file.small.layout, [tuple(one)[:4] for one in file.placed]
        make = self._part_columns
        columns = make() if self.kept else self._plan.derive("columns", made_for, make)
        values = self._values(self._plan.common), self._values(self._plan.own)
        return columns.encode(b"".join(digests), common=values[0], own=values[1])

    def _part_columns(self) -> PartColumns:
        plan = self._plan
        builder = PartBuilder(self._rank, algorithm=self._algorithm)
        items = {item.key: item for item in self._described.items}

        def add_tensor(key: str) -> list[int]:
            found = []
            for name in (key, *plan.ties.get(key, ())):
                item = items[name]
                found.append(builder.add_tensor(name, item.dtype, item.shape, plan.flags.get(name, 0)))
            return found

        def add_file(name: str, slab_bytes: int, placed: Iterable[Placed | KeptChunk]) -> None:
            builder.add_file(name, ())
            if slab_bytes:
                builder.add_slab(0, slab_bytes)
            for one in placed:
                for row in add_tensor(one.key):
                    builder.add_chunk(row, one.offset, one.box)

        for kept in self.kept:
            add_file(kept.receipt.name, kept.slab_bytes, kept.chunks)
        for file in self.files:
            add_file(file.name, file.slab_bytes, file.all_placed)
        for number in plan.empty:
            add_tensor(self._described.items[number].key)
        return builder.columns()

    def told(self, part: bytes) -> RankTold:
        """Return the report that the leader needs for the outline, besides this part of the index."""
        plan, digest = self._plan, Digest.of(part, algorithm=self._algorithm)
        size_bytes = sum(placed.size_bytes for file in self.files for placed in file.placed)
        size_bytes += sum(file.small.layout.payload_bytes for file in self.files if file.small is not None)
        size_bytes += sum(chunk.size_bytes for kept in self.kept for chunk in kept.chunks)
        return RankTold(size_bytes, len(plan.common), len(plan.own), plan.spans, (len(part), str(digest)))

    def kept_after(self, attempt: str, stored: Sequence[Stored], *, linked: bool) -> Kept:
        """Return the files that the next save may take over, once they are stored in that directory.

        With `linked` the files that were taken over lie there too.
        """
        taken = self.kept
        if linked:
            taken = [file._replace(receipt=file.receipt._replace(attempt=attempt)) for file in taken]
        written = [self._kept_file(file, attempt, one) for file, one in zip(self.files, stored, strict=True)]
        return Kept(attempt, (*taken, *written))

    def _kept_file(self, file: ShardFile, attempt: str, stored: Stored) -> KeptFile:
        regions = iter(stored.block_digests)
        slab_digests = next(regions) if file.slab_bytes else b""
        chunks = []
        for key, box, offset, size_bytes, *_ in file.all_placed:
            blocks = b"" if offset < file.slab_bytes else next(regions)
            chunks.append(KeptChunk(key, box, offset, size_bytes, self._digests[key, box], blocks))
        receipt = Receipt(file.name, stored.size_bytes, stored.digest, self._rank, attempt=attempt)
        return KeptFile(receipt, file.slab_bytes, slab_digests, tuple(chunks))

    def _values(self, keys: Sequence[str]) -> bytes:
        """Return the JSON object of some plain values; their texts are JSON already."""
        if not keys:
            return b""
        pairs = (f"{json.dumps(key)}:{self._described.values[key]}" for key in keys)
        return f"{{{','.join(pairs)}}}".encode()


def cast_now(key: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor in another dtype, contiguous. Raises InvalidState for a number that it cannot hold."""
    made = tensor.detach().to(dtype).resolve_neg().contiguous()
    check_range(key, tensor, made)
    return made


def _num_files(size_bytes: int, num_files: int, shared_bytes: int) -> int:
    if not size_bytes:
        return 0
    return max(-(-size_bytes // FILE_BYTES), min(num_files, size_bytes // shared_bytes), 1)


_Sample = tuple[int, Placed, np.ndarray[Any, Any], torch.Tensor]
"""The number of a file, a tensor in it, the places of elements as in a contiguous tensor, and the elements there, on
the device of the tensor: the check does not wait for a device."""


class CopyCheck:
    """The check of one save that staged copies equal their tensors; digests cannot show that, since they are of the
    copies. Create it in the thread that saves, before anything is copied.

    Elements are picked by index, which takes another way through torch than a copy of a stretch does.
    """

    def __init__(
        self,
        large: Sequence[tuple[int, Placed]],
        slabs: Sequence[tuple[int, Sequence[Placed]]],
        *,
        turn: int,
        every: bool,
    ) -> None:
        """Choose the samples among tensors, which come with the number of their file. `large` have a payload each,
        small ones lie in `slabs`.

        With `every` all bytes of all of them are compared. Otherwise a few elements are compared: of at least one
        tensor of each device, dtype and kind of memory, of one more for each 512 MiB, and of some small ones. Each turn
        takes others, so that all are compared in time. That costs about 0.1 ms for each tensor, below 1 % of copying
        512 MiB.
        """
        self._every = [*large, *((at, placed) for at, slab in slabs for placed in slab)] if every else []
        self.samples: list[_Sample] = []
        if not every:
            kinds = {(is_plain_memory(one.tensor), one.tensor.device, one.tensor.dtype): (at, one) for at, one in large}
            num_large = sum(one.size_bytes for _, one in large) // _SAMPLED_BYTES
            of_slabs = [(at, placed) for at, slab in slabs for placed in _in_turn(slab, turn, _SMALL)]
            chosen = [*kinds.values(), *_in_turn(large, turn, num_large), *of_slabs]
            numbers = random.Random(turn)
            once = {(file, placed.offset): (file, placed) for file, placed in chosen}
            self.samples = [(*one, *_elements_of(one[1].tensor, numbers)) for one in once.values()]

    def compare(self, copies: Sequence[memoryview]) -> None:
        """Compare with the copies of all files. Raises CkptstoreError, with the key, for one that differs."""
        for file, placed in self._every:
            _refuse(placed, _elements(copies[file], placed), _as_elements(_as_stored(placed, _plain(placed.tensor))))
        for file, placed, positions, values in self.samples:
            _refuse(placed, _elements(copies[file], placed)[positions], _as_elements(_as_stored(placed, values)))


def _one_nan(elements: np.ndarray[Any, Any], dtype: torch.dtype) -> np.ndarray[Any, Any]:
    numbers = torch.from_numpy(np.array(elements)).view(dtype).float()
    return np.where(numbers.isnan().numpy(), np.uint8(255), elements)


def _in_turn(placed: Sequence[_T], turn: int, num_chosen: int) -> list[_T]:
    return [placed[(turn * num_chosen + number) % len(placed)] for number in range(min(num_chosen, len(placed)))]


def _elements_of(tensor: torch.Tensor, numbers: random.Random) -> tuple[np.ndarray[Any, Any], torch.Tensor]:
    tensor, last = _plain(tensor), tensor.numel()
    starts = [0, max(0, last - _RUN), *(numbers.randrange(last) for _ in range(_RUNS))]
    positions = distinct([at for start in starts for at in range(start, min(start + _RUN, last))])
    if tensor.dim() == 0:
        return positions, tensor.reshape(1)
    places = np.unravel_index(positions, tuple(tensor.shape))
    with torch.no_grad():
        try:
            return positions, tensor[tuple(torch.from_numpy(at).to(tensor.device, non_blocking=True) for at in places)]
        except torch.OutOfMemoryError:  # a full device is saved all the same, but has to be waited for
            elements = [_on_host(tensor[tuple(map(int, place))]) for place in zip(*places, strict=True)]
            return positions, torch.stack(elements)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return bits_of(tensor if type(tensor) in PLAIN_TYPES else tensor.as_subclass(torch.Tensor))


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    # `cpu()` would first copy conjugates and opposites on the device, which may be full.
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(tensor)


def _as_elements(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return the bytes of a tensor, a row for each element."""
    return _on_host(tensor).reshape(-1).view(torch.uint8).numpy().reshape(-1, tensor.element_size())


def _elements(copy: memoryview, placed: Placed) -> np.ndarray[Any, Any]:
    """Return the copied bytes of a tensor, a row for each element."""
    element_bytes = (placed.cast or placed.tensor.dtype).itemsize
    size_bytes = placed.tensor.numel() * element_bytes
    return np.frombuffer(copy, np.uint8, size_bytes, placed.offset).reshape(-1, element_bytes)


def _as_stored(placed: Placed, elements: torch.Tensor) -> torch.Tensor:
    """Return elements of a tensor, as whole numbers, in the dtype in which it is stored."""
    return elements if placed.cast is None else elements.view(placed.tensor.dtype).to(placed.cast)


def _refuse(placed: Placed, copy: np.ndarray[Any, Any], original: np.ndarray[Any, Any]) -> None:
    if placed.cast is not None:  # torch has several NaN, by the way that it takes
        copy, original = (_one_nan(elements, placed.cast) for elements in (copy, original))
    if not np.array_equal(copy, original):
        tensor = placed.tensor
        raise CkptstoreError(
            f"the copy of {placed.key} that was made for this save is not the tensor: {int((copy != original).sum())} "
            f"of {copy.size} bytes that were compared differ ({tensor.dtype}, shape {list(tensor.shape)}, strides "
            f"{list(tensor.stride())}, on {tensor.device})",
            hint="Nothing is committed. This is a defect of ckptstore: please report it. save() copies in another way",
        )
