"""Open a tensor index: its outline, and the parts that a rank needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from ckptstore.errors import CheckpointDamaged, UnsupportedVersion
from ckptstore.format.digest import Digest
from ckptstore.format.manifest import Manifest
from ckptstore.loading.checkpoint_files import CheckpointFiles
from ckptstore.state.index.outline import INDEX_NAME, Extent, Outline
from ckptstore.state.index.part import Part
from ckptstore.state.index.tensor_index import TensorIndex
from ckptstore.transfer import RangeRead

HEAD_BYTES = 1 << 20
"""The bytes of the index file that the first request reads. They hold the whole index of some 40,000 chunks."""


class IndexReader:
    """A reader that reads and checks the outline of an index and each part once. Safe for one thread."""

    def __init__(
        self,
        read: Callable[[Sequence[RangeRead]], None],
        prefix: str,
        size_of: Callable[[str], int | None],
        digest: Digest | None = None,
    ) -> None:
        """Read the outline. `size_of` has the sizes of the files in the directory `prefix`, `digest` is that of
        `tensors.index`.

        Raises CheckpointDamaged, UnsupportedVersion, FileMissing, StorageError.
        """
        self._read, self._prefix, self._size_of = read, prefix, size_of
        self._parts: dict[int, Part] = {}
        size_bytes = size_of(INDEX_NAME) or 0
        head = self._head = memoryview(bytearray(min(size_bytes, HEAD_BYTES)))
        is_checked = digest is not None and len(head) == size_bytes
        self._fill([(INDEX_NAME, 0, head, digest if is_checked else None)])
        try:
            extent = Extent.of(head, size_bytes)
        except (CheckpointDamaged, UnsupportedVersion):
            if digest is None or is_checked:
                raise
            head = self._head = memoryview(bytearray(size_bytes))  # damage must not be taken for a later version
            self._fill([(INDEX_NAME, 0, head, digest)])
            extent = Extent.of(head, size_bytes)
        if not extent.is_sound(head):
            whole = memoryview(bytearray(extent.stop))
            whole[: extent.start] = head[: extent.start]
            self._fill([(INDEX_NAME, extent.start, whole[extent.start :], extent.digest)])
            head = whole
        self._start = extent.stop
        self.outline = Outline.decode(head)
        if self._start + self.outline.packed_bytes != size_bytes:
            raise CheckpointDamaged(f"{INDEX_NAME} has an outline that does not fit its parts", file=INDEX_NAME)

    @staticmethod
    def of(manifest: Manifest, read: Callable[[Sequence[RangeRead]], None], prefix: str) -> IndexReader:
        """Return the reader of the index of a checkpoint, which has one. Raises as `__init__` does."""
        sizes_bytes = {item.name: item.size_bytes for item in manifest.files}
        found = IndexReader(read, prefix, sizes_bytes.get, manifest.by_name[INDEX_NAME].digest)
        if found.outline.world_size != manifest.world_size:
            raise CheckpointDamaged(
                f"{INDEX_NAME} is of {found.outline.world_size} ranks, and the manifest of {manifest.world_size}",
                step=manifest.step,
                file=INDEX_NAME,
            )
        return found

    def opened(self, *, rank: int | None) -> TensorIndex:
        """Return the index with the parts read so far, the parts with values common to all ranks, and the part of
        `rank`; without a rank, one for each value that ranks had of their own."""
        outline = self.outline
        if outline.is_packed and self._start + outline.packed_bytes <= len(self._head):
            return self.whole()
        return self.with_parts([*outline.common, *(outline.own.values() if rank is None else [rank])])

    def whole(self) -> TensorIndex:
        """Return the index with the parts of all ranks."""
        return self.with_parts(range(self.outline.world_size))

    def with_parts(self, ranks: Iterable[int]) -> TensorIndex:
        """Return the index with the parts of these ranks added. Raises CheckpointDamaged, FileMissing, StorageError."""
        found: dict[int, memoryview] = {}
        wanted = []
        for rank in sorted(set(ranks) - self._parts.keys()):
            name, offset, size_bytes, digest = *self.outline.place(rank), *self.outline.parts[rank]
            start = self._start + offset
            found[rank] = self._head[start : start + size_bytes]
            if name != INDEX_NAME and self._size_of(name) != size_bytes:
                raise CheckpointDamaged(
                    f"{INDEX_NAME} has {size_bytes} bytes for {name}, and it has {self._size_of(name)}", file=name
                )
            if name != INDEX_NAME or len(found[rank]) < size_bytes or digest.like(found[rank]) != digest:
                found[rank] = memoryview(bytearray(size_bytes))
                wanted.append((name, start if name == INDEX_NAME else 0, found[rank], digest))
        self._fill(wanted)
        for rank, data in found.items():
            self._parts[rank] = Part.decode(data, rank=rank, file=self.outline.place(rank)[0])
        return TensorIndex([self._parts[rank] for rank in sorted(self._parts)], self.outline)

    def _fill(self, ranges: Sequence[tuple[str, int, memoryview, Digest | None]]) -> None:
        """Fill memory from these offsets of these files, and check each against its digest."""
        self._read(
            [
                RangeRead(f"{self._prefix}{name}", offset, (view,), () if digest is None else ((len(view), digest),))
                for name, offset, view, digest in ranges
            ]
        )


def read_whole(files: CheckpointFiles, manifest: Manifest) -> TensorIndex | None:
    """Return the index with the parts of all ranks; None if the checkpoint has none. Raises CheckpointDamaged."""
    if INDEX_NAME not in manifest.by_name:
        return None
    index = IndexReader.of(manifest, files.read, files.prefix).whole()
    index.check_files({item.name: item.size_bytes for item in manifest.files})
    return index
