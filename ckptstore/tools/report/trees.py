"""The tensors of some checkpoints, side by side: what they are, and for each a short text that tells whether two are
equal.

Layouts are shared: a run has the same tensors in every checkpoint, so what a further one adds is its digests.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from math import prod
from typing import Any

from ckptstore.checkpoint import Checkpoint, files_behind
from ckptstore.format.digest import BLOCK_BYTES, Digest
from ckptstore.format.manifest import Manifest
from ckptstore.loading.checkpoint_files import CheckpointFiles
from ckptstore.runtime.collector import collector_paused
from ckptstore.tools.report.document import SeenLayout, SeenTree
from ckptstore.transfer import RangeRead

MOST_SHARED_BYTES = 4 << 20
"""The most bytes to read of regions of a checkpoint with several small tensors: their digests are of all together."""
_PLACE_BYTES, _CONTENT_BYTES = 3, 6


@dataclass(frozen=True, slots=True)
class ReadTree:
    """The tensors of one checkpoint as parallel arrays, in the order of keys."""

    keys: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    size_bytes: tuple[int, ...]
    digests: tuple[str | None, ...] | None


@dataclass(slots=True)
class Forest:
    """Trees as the document has them."""

    layouts: list[SeenLayout] = field(default_factory=list)
    dtype_names: list[str] = field(default_factory=list)
    trees: dict[str, SeenTree] = field(default_factory=dict)
    _known: dict[tuple[Any, ...], int] = field(default_factory=dict)

    def add(self, number: int, tree: ReadTree) -> None:
        """Add the tree of the checkpoint with that number."""
        self.dtype_names += [name for name in dict.fromkeys(tree.dtypes) if name not in self.dtype_names]
        dtypes = tuple(map({name: at for at, name in enumerate(self.dtype_names)}.__getitem__, tree.dtypes))
        known = (tree.keys, dtypes, tree.shapes, tree.size_bytes)
        at = self._known.setdefault(known, len(self.layouts))
        if at == len(self.layouts):
            self.layouts.append(
                SeenLayout(keys=tree.keys, dtypes=dtypes, shapes=tree.shapes, size_bytes=tree.size_bytes)
            )
        self.trees[str(number)] = SeenTree(layout=at, digests=tree.digests)


def read_tree(checkpoint: Checkpoint) -> ReadTree:
    """Return the tensors of a checkpoint with a state, from its index alone, and small ones from their bytes.

    No lease is written: a prune may delete the checkpoint meanwhile. Raises CheckpointGone, CheckpointDamaged,
    StorageError; ModuleNotFoundError without numpy or, for what torch's DCP wrote, without torch.
    """
    from ckptstore.loading.index_read import read_whole

    files = files_behind(checkpoint)
    manifest = files.read_manifest()[0]
    index = read_whole(files, manifest)
    return _stock_tree(checkpoint) if index is None else _tree_of(index, files, manifest)


def _stock_tree(checkpoint: Checkpoint) -> ReadTree:
    """Return the tree of what torch's DCP wrote, which has no digests."""
    tensors = list(checkpoint.tensors.values())
    return ReadTree(
        keys=tuple(item.key for item in tensors),
        dtypes=tuple(item.dtype for item in tensors),
        shapes=tuple(item.shape for item in tensors),
        size_bytes=tuple(item.size_bytes for item in tensors),
        digests=None,
    )


def _tree_of(index: Any, files: CheckpointFiles, manifest: Manifest) -> ReadTree:
    from ckptstore.state.index.part import DTYPES

    with collector_paused():
        entries = sorted((key, entry) for key, entry in index.tensors.items() if not entry.beside_value)
        sizes = tuple(entry.size_bytes for _, entry in entries)
        places = {
            key: [index.chunks(source, rank) for rank in index.ranks_of(source) or [0]]
            for key, _ in entries
            for source in [index.aliases.get(key, key)]
        }
        marks = _Marks(index, files, manifest)
        shared = [
            chunk.region
            for (key, entry), size_bytes in zip(entries, sizes, strict=True)
            for chunks in places[key]
            if not marks.has_its_own(chunks, size_bytes)
            for chunk in chunks
        ]
        marks.read(list(dict.fromkeys(shared)))
        digests = tuple(
            marks.digest(places[key], size_bytes, DTYPES[entry.dtype][1])
            for (key, entry), size_bytes in zip(entries, sizes, strict=True)
        )
    return ReadTree(
        keys=tuple(key for key, _ in entries),
        dtypes=tuple(entry.dtype for _, entry in entries),
        shapes=tuple(entry.shape for _, entry in entries),
        size_bytes=sizes,
        digests=digests,
    )


class _Marks:
    """Digests of tensors: of the blocks of what holds the tensor alone, else of the bytes themselves."""

    def __init__(self, index: Any, files: CheckpointFiles, manifest: Manifest) -> None:
        self._index, self._files, self._manifest = index, files, manifest
        regions = index.regions
        self._offset: list[int] = regions.offset.tolist()
        self._size: list[int] = regions.size_bytes.tolist()
        self._file: list[int] = regions.file.tolist()
        self._held: dict[int, memoryview] = {}

    def has_its_own(self, chunks: Sequence[Any], size_bytes: int) -> bool:
        """Return True if the regions that hold a tensor hold nothing else."""
        held_bytes: int = sum(self._size[chunk.region] for chunk in chunks)
        return held_bytes == size_bytes

    def read(self, regions: Sequence[int]) -> None:
        """Read the bytes of some regions, as many as the bounds allow."""
        ranges, left_bytes = [], MOST_SHARED_BYTES
        for region in regions:
            if self._size[region] > left_bytes:
                continue
            left_bytes -= self._size[region]
            self._held[region] = memoryview(bytearray(self._size[region]))
            receipt = self._manifest.by_name[self._index.files[self._file[region]]]
            key, blocks = self._files.key_of(receipt), self._blocks(region)
            sizes = [min(BLOCK_BYTES, self._size[region] - at * BLOCK_BYTES) for at in range(len(blocks))]
            checks = tuple(zip(sizes, blocks, strict=True))
            ranges.append(RangeRead(key, self._offset[region], (self._held[region],), checks))
        self._files.read(ranges)

    def digest(self, chunks_of_ranks: Sequence[Sequence[Any]], size_bytes: int, item_bytes: int) -> str | None:
        """Return a digest of how ranks had divided the tensor, and of its contents. None for what was not read."""
        place, content = blake2b(digest_size=_PLACE_BYTES), blake2b(digest_size=_CONTENT_BYTES)
        for chunks in chunks_of_ranks:
            is_own = self.has_its_own(chunks, size_bytes)
            for chunk in sorted(chunks, key=lambda chunk: chunk.box):
                if is_own:
                    start = chunk.offset - self._offset[chunk.region]
                    blocks = self._blocks(chunk.region)
                    algorithms = sorted({digest.algorithm for digest in blocks})
                    place.update(repr(("blocks", chunk.box, start, self._size[chunk.region], algorithms)).encode())
                    content.update(repr([digest.value for digest in blocks]).encode())
                    continue
                held = self._held.get(chunk.region)
                if held is None:
                    return None
                start = chunk.offset - self._offset[chunk.region]
                data = held[start : start + prod(chunk.box.sizes) * item_bytes]
                place.update(repr(("bytes", chunk.box)).encode())
                content.update(str(Digest.of(data)).encode())
        return f"{_short(place.digest())}/{_short(content.digest())}"

    def _blocks(self, region: int) -> list[Digest]:
        found: list[Digest] = self._index.digests(region)
        return found


def _short(digest: bytes) -> str:
    return base64.urlsafe_b64encode(digest).decode()
