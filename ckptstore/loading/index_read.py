"""Opening a large tensor index: only the parts that a rank needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from ckptstore.errors import CheckpointDamaged
from ckptstore.format.digest import Digest
from ckptstore.format.manifest import Manifest, Receipt
from ckptstore.loading.checkpoint_files import CheckpointFiles
from ckptstore.state.index.index_file import ENTRY_BYTES, FOOTER_BYTES, INDEX_NAME, places
from ckptstore.state.index.outline import OUTLINE_NAME, Outline
from ckptstore.state.index.part import Part
from ckptstore.state.index.tensor_index import TensorIndex
from ckptstore.transfer import RangeRead

WHOLE_BYTES = 1 << 20
"""An index up to this size, of some 40,000 chunks, is read as a whole: that is one request, and then all is known."""
MOST_SHARE = 0.5
"""If a rank may have to read more than this share of the index, all is read as well."""


def read_own_parts(files: CheckpointFiles, receipt: Receipt, *, rank: int, world_size: int) -> TensorIndex | None:
    """The part of one rank, with those that other ranks may need too. `world_size` is that of the save.

    None, on every rank, when that would not save much: the index is small, or those parts are more than half of it.
    What is read is checked against the digests in the index itself. Raises CheckpointDamaged.
    """
    tail_bytes = ENTRY_BYTES * world_size + FOOTER_BYTES
    if receipt.size_bytes <= max(WHOLE_BYTES, tail_bytes):
        return None
    tail = memoryview(bytearray(tail_bytes))
    _read(files, receipt, [(receipt.size_bytes - tail_bytes, tail, ())])
    directory, footer = tail[:-FOOTER_BYTES], tail[-FOOTER_BYTES:]
    found = places(directory, footer, receipt.size_bytes, file=receipt.name)
    shared_bytes = sum(place.size_bytes for place in found if place.is_shared)
    largest_bytes = max((place.size_bytes for place in found if not place.is_shared), default=0)
    if shared_bytes + largest_bytes > MOST_SHARE * receipt.size_bytes:
        return None
    chosen = {number: place for number, place in enumerate(found) if number == rank or place.is_shared}
    parts = {number: memoryview(bytearray(place.size_bytes)) for number, place in chosen.items()}
    checks = {number: ((place.size_bytes, place.digest),) for number, place in chosen.items()}
    _read(files, receipt, [(chosen[number].offset, parts[number], checks[number]) for number in chosen])
    return TensorIndex.of_parts(parts, world_size=world_size, file=receipt.name)


def read_whole(files: CheckpointFiles, manifest: Manifest) -> TensorIndex | None:
    """The index with the parts of all ranks; None for a checkpoint that has none. Raises CheckpointDamaged."""
    outline, listed = manifest.by_name.get(OUTLINE_NAME), manifest.by_name.get(INDEX_NAME)
    if outline is not None:
        index = PartReader(Outline.decode(files.read_file(outline)), files.read, files.prefix).whole()
    elif listed is not None:
        index = TensorIndex.decode(files.read_file(listed), file=listed.name)
    else:
        return None
    index.check_files({item.name: item.size_bytes for item in manifest.files})
    return index


class PartReader:
    """Reads parts of an index that has an outline, each once, and checks them. Safe for one thread."""

    def __init__(self, outline: Outline, read: Callable[[Sequence[RangeRead]], None], prefix: str) -> None:
        self._outline, self._read, self._prefix = outline, read, prefix
        self._parts: dict[int, Part] = {}

    def opened(self, *, rank: int | None) -> TensorIndex:
        """With the values that are for all ranks; and what a rank of the save has of its own, or else the lowest one
        that has its own."""
        own = self._outline.own.values() if rank is None else [rank]
        return self.with_parts([*self._outline.common, *own])

    def whole(self) -> TensorIndex:
        """With the parts of all ranks."""
        return self.with_parts(range(self._outline.world_size))

    def with_parts(self, ranks: Iterable[int]) -> TensorIndex:
        """With the parts of these ranks too. Raises CheckpointDamaged, FileMissing, StorageError."""
        outline, new = self._outline, sorted(set(ranks) - self._parts.keys())
        places = [outline.parts[rank] for rank in new]
        views = [memoryview(bytearray(place.size_bytes)) for place in places]
        names = [outline.part_name(rank) for rank in new]
        self._read(
            [
                RangeRead(f"{self._prefix}{name}", 0, (view,), ((place.size_bytes, place.digest),))
                for name, view, place in zip(names, views, places, strict=True)
            ]
        )
        for rank, name, view in zip(new, names, views, strict=True):
            part = self._parts[rank] = Part.decode(view, file=name)
            if part.rank != rank:
                raise CheckpointDamaged(f"{name} has the part of rank {part.rank}", file=name)
        parts = [self._parts[rank] for rank in sorted(self._parts)]
        return TensorIndex(parts, world_size=outline.world_size, outline=outline)


def _read(
    files: CheckpointFiles, receipt: Receipt, ranges: Sequence[tuple[int, memoryview, tuple[tuple[int, Digest], ...]]]
) -> None:
    """Fill memory from these offsets of the file."""
    key = files.key_of(receipt)
    files.read([RangeRead(key, offset, (view,), checks) for offset, view, checks in ranges])
