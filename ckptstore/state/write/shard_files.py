"""One rank's files of a state checkpoint: the place of each frame, the sources for the transfer, and the index.

Small tensors lie in a slab at the start of the first file, one frame after another. Each larger one has its payload at
a multiple of 4,096, so that it can be mapped and read directly. A rank writes several files when there is much to
write: threads that write one file on a disk wait for each other.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from ckptstore.format.digest import BLOCK_BYTES, DEFAULT, Digest
from ckptstore.format.manifest import Receipt
from ckptstore.format.naming import spread_directory
from ckptstore.runtime.collector import collector_paused
from ckptstore.state.index.part import PartBuilder
from ckptstore.state.tensors.boxes import Box, inside
from ckptstore.state.tensors.frames import Template, template
from ckptstore.state.tensors.segments import Bytes, Copied, Segment, SegmentSource, Slab, narrowed, payload_segment
from ckptstore.state.write.assignment import RankPlan
from ckptstore.state.write.copy_check import CopyCheck, Placed
from ckptstore.state.write.describe import Described
from ckptstore.state.write.incremental import Kept, KeptChunk, KeptFile, Place, digests_of, free_names
from ckptstore.state.write.outlining import RankTold
from ckptstore.transfer import Stored

ALIGN_BYTES = 4096
FILE_BYTES = 4 << 30
"""The most bytes that are planned for a file, unless one chunk is larger."""
SHARED_FILE_BYTES = 256 << 20
"""The least bytes for each file from which a rank writes several files at once."""
LOCAL_SHARED_FILE_BYTES = 64 << 20
"""The same on a disk, which takes bytes for one file from one thread at a time."""


class _Placed(NamedTuple):
    key: str
    box: Box
    offset: int
    payload_bytes: int
    tensor: torch.Tensor


@dataclass(slots=True)
class ShardFile:
    """One file, before it is written."""

    name: str
    segments: list[Segment] = field(default_factory=list)
    regions: list[tuple[int, int]] = field(default_factory=list)
    placed: list[_Placed] = field(default_factory=list)
    slab_bytes: int = 0
    size_bytes: int = 0

    def add(self, segment: Segment) -> None:
        """Add a segment at the end."""
        self.segments.append(segment)
        self.size_bytes += segment.size_bytes

    def add_slab(self, keys: Sequence[tuple[str, Box]], slab: Slab) -> None:
        """Begin with small tensors."""
        offset = 0
        for (key, box), made, tensor, end in zip(keys, slab.templates, slab.tensors, slab.ends, strict=True):
            self.placed.append(_Placed(key, box, offset + len(made.header), made.payload_bytes, tensor))
            offset = end
        self.slab_bytes = slab.size_bytes
        self.regions.append((0, slab.size_bytes))
        self.add(slab)

    def add_large(self, key: str, box: Box, made: Template, tensor: torch.Tensor) -> None:
        """Add one tensor, with its payload aligned."""
        gap = -(self.size_bytes + len(made.header)) % ALIGN_BYTES
        self.add(Bytes(memoryview(bytes(gap) + made.header)))
        self.placed.append(_Placed(key, box, self.size_bytes, made.payload_bytes, tensor))
        self.regions.append((self.size_bytes, made.payload_bytes))
        self.add(payload_segment(tensor))
        self.add(Bytes(memoryview(made.trailer)))

    def source(self) -> SegmentSource:
        """Return the source to be written."""
        return SegmentSource(self.segments, self.regions)


class Spread(NamedTuple):
    """The number of files and directories over which the bytes of a rank are spread."""

    num_files: int = 1
    """The most files that a rank writes at once."""
    num_prefixes: int = 1
    """The directories that share the files of all ranks."""
    on_disk: bool = False
    """True for a disk, which takes bytes for one file from one thread at a time."""


class ShardFiles:
    """The files that one rank writes."""

    @collector_paused()
    def __init__(
        self,
        described: Described,
        plan: RankPlan,
        *,
        rank: int,
        spread: Spread | None = None,
        incremental: bool = False,
        before: Kept | None = None,
        algorithm: str = DEFAULT,
    ) -> None:
        """Lay out the files. With `incremental` the chunks get digests, and files of the checkpoint `before` are taken
        over. `algorithm` is that of the digests."""
        spread = spread or Spread()
        self._described = described
        self._plan = plan
        self._rank = rank
        self._directory = spread_directory(rank, spread.num_prefixes)
        self._incremental = incremental
        self._algorithm = algorithm
        self._before = before
        self._digests: dict[Place, str] = {}
        self.kept: list[KeptFile] = []
        """Files of the checkpoint before that are taken over, with those of their chunks that are still current."""
        small, large = self._sorted_writes()
        shared_bytes = LOCAL_SHARED_FILE_BYTES if spread.on_disk else SHARED_FILE_BYTES
        count = _num_files(sum(made.size_bytes for _, _, made, _ in [*small, *large]), spread.num_files, shared_bytes)
        self.files = [ShardFile(name) for name in self._free_names(count)]
        if small:
            slab = Slab([made for _, _, made, _ in small], [tensor for _, _, _, tensor in small])
            self.files[0].add_slab([(key, box) for key, box, _, _ in small], slab)
        share = -(-sum(made.size_bytes for _, _, made, _ in large) // max(1, len(self.files)))
        at, filled = 0, 0
        for key, box, made, tensor in large:
            if filled + made.size_bytes // 2 > share and at + 1 < len(self.files):
                at, filled = at + 1, 0
            self.files[at].add_large(key, box, made, tensor)
            filled += made.size_bytes

    def _free_names(self, count: int) -> list[str]:
        return free_names(self._rank, [file.receipt.name for file in self.kept], count, directory=self._directory)

    def _sorted_writes(self) -> tuple[list[_Frame], list[_Frame]]:
        small: list[_Frame] = []
        large: list[_Frame] = []
        frames = list(self._frames())
        if self._incremental:
            self._digests = digests_of((key, box, tensor) for key, box, _, tensor in frames)
            self.kept = self._before.still_good(self._digests, algorithm=self._algorithm) if self._before else []
        held = {(chunk.key, chunk.box) for file in self.kept for chunk in file.chunks}
        for frame in frames:
            if not held or (frame[0], frame[1]) not in held:
                (small if frame[2].payload_bytes < BLOCK_BYTES else large).append(frame)
        return small, large

    def _frames(self) -> Iterator[_Frame]:
        items, memory = self._described.items, self._described.memory
        for write in self._plan.writes:
            item = items[write.item]
            tensor = memory[item.key][write.held]
            held = item.boxes[write.held]
            if write.box != held:
                tensor = narrowed(tensor, inside(write.box, held))
            yield item.key, write.box, template(tensor.dtype, write.box.sizes), tensor

    @property
    def size_bytes(self) -> int:
        """The size of all files."""
        return sum(file.size_bytes for file in self.files)

    def add_frames(self, frames: Mapping[str, bytes]) -> dict[str, tuple[str, int, int]]:
        """Add further bytes behind the tensors of the last file, equal ones once. Return for each name the file, the
        offset and the length."""
        if not frames:
            return {}
        if not self.files:
            self.files = [ShardFile(name) for name in self._free_names(1)]
        file, known = self.files[-1], dict[bytes, int]()
        for frame in frames.values():
            if frame not in known:
                known[frame] = file.size_bytes
                file.add(Bytes(memoryview(frame)))
        return {name: (file.name, known[frame], len(frame)) for name, frame in frames.items()}

    def sources(self) -> list[tuple[str, SegmentSource]]:
        """Return name and source of each file."""
        return [(file.name, file.source()) for file in self.files]

    def copy_check(self, *, turn: int, every: bool) -> CopyCheck:
        """Return the check that compares copies of the files with the tensors in them."""
        large: list[Placed] = []
        small: list[Placed] = []
        for number, file in enumerate(self.files):
            gathered = {id(segment.tensor) for segment in file.segments if isinstance(segment, Copied)}
            for key, _, offset, size_bytes, tensor in file.placed:
                one = Placed(key, number, offset, size_bytes, id(tensor) in gathered, tensor)
                (small if offset < file.slab_bytes else large).append(one)
        return CopyCheck(large, small, turn=turn, every=every)

    @collector_paused()
    def index_part(self, block_digests: Sequence[Sequence[bytes]]) -> bytes:
        """Return this rank's part of the tensor index, from the digests of each file's regions."""
        described, plan = self._described, self._plan
        builder = PartBuilder(self._rank, algorithm=self._algorithm)
        items = {item.key: item for item in described.items}

        def rows_of(key: str) -> list[int]:
            found = []
            for name in (key, *plan.ties.get(key, ())):
                item = items[name]
                found.append(builder.add_tensor(name, item.dtype, item.shape, plan.flags.get(name, 0)))
            return found

        for kept in self.kept:
            builder.add_file(kept.receipt.name, kept.region_digests)
            if kept.slab_bytes:
                builder.add_slab(0, kept.slab_bytes)
            for chunk in kept.chunks:
                for row in rows_of(chunk.key):
                    builder.add_chunk(row, chunk.offset, chunk.box)
        for file, digests in zip(self.files, block_digests, strict=True):
            builder.add_file(file.name, digests)
            if file.slab_bytes:
                builder.add_slab(0, file.slab_bytes)
            for placed in file.placed:
                for row in rows_of(placed.key):
                    builder.add_chunk(row, placed.offset, placed.box)
        for number in plan.empty:
            rows_of(described.items[number].key)
        common, own = self._values(plan.common), self._values(plan.own)
        return builder.encode(common=common, own=own)

    def told(self, part: bytes) -> RankTold:
        """Return the report that the leader needs for the outline, besides this part of the index."""
        plan, digest = self._plan, Digest.of(part, algorithm=self._algorithm)
        size_bytes = sum(placed.payload_bytes for file in self.files for placed in file.placed)
        size_bytes += sum(chunk.size_bytes for kept in self.kept for chunk in kept.chunks)
        return RankTold(size_bytes, len(plan.common), len(plan.own), plan.spans, (len(part), str(digest)))

    def kept_after(self, attempt: str, stored: Sequence[Stored], *, linked: bool) -> Kept:
        """Return the files that the next save may take over, once they are stored in that directory.

        With `linked` the files that were taken over lie there too.
        """
        written = [self._kept_file(file, attempt, one) for file, one in zip(self.files, stored, strict=True)]
        taken = [file.moved_to(attempt) if linked else file for file in self.kept]
        return Kept(attempt, (*taken, *written))

    def _kept_file(self, file: ShardFile, attempt: str, stored: Stored) -> KeptFile:
        regions = iter(stored.block_digests)
        slab_digests = next(regions) if file.slab_bytes else b""
        chunks = []
        for placed in file.placed:
            blocks = b"" if placed.offset < file.slab_bytes else next(regions)
            digest = self._digests[placed.key, placed.box]
            chunks.append(KeptChunk(placed.key, placed.box, placed.offset, placed.payload_bytes, digest, blocks))
        receipt = Receipt(file.name, stored.size_bytes, stored.digest, self._rank, attempt=attempt)
        return KeptFile(receipt, file.slab_bytes, slab_digests, tuple(chunks))

    def _values(self, keys: Sequence[str]) -> bytes:
        """Return the JSON object of some plain values; their texts are JSON already."""
        if not keys:
            return b""
        pairs = (f"{json.dumps(key)}:{self._described.values[key]}" for key in keys)
        return f"{{{','.join(pairs)}}}".encode()


_Frame = tuple[str, Box, Template, torch.Tensor]


def _num_files(size_bytes: int, num_files: int, shared_bytes: int) -> int:
    if not size_bytes:
        return 0
    return max(-(-size_bytes // FILE_BYTES), min(num_files, size_bytes // shared_bytes), 1)
