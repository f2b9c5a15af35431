"""Opening a large tensor index: only the parts that a rank needs if it has what it had in the save."""

from __future__ import annotations

from collections.abc import Sequence

from ckptstore.format.manifest import Receipt
from ckptstore.loading.story import CheckpointFiles
from ckptstore.state.index.index_file import ENTRY_BYTES, FOOTER_BYTES, places
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
    checks = {number: ((place.size_bytes, place.crc32c),) for number, place in chosen.items()}
    _read(files, receipt, [(chosen[number].offset, parts[number], checks[number]) for number in chosen])
    return TensorIndex.of_parts(parts, world_size=world_size, file=receipt.name)


def _read(
    files: CheckpointFiles, receipt: Receipt, ranges: Sequence[tuple[int, memoryview, tuple[tuple[int, int], ...]]]
) -> None:
    """Fill memory from these offsets of the file."""
    key = files.key_of(receipt)
    files.read([RangeRead(key, offset, (view,), checks) for offset, view, checks in ranges])
