"""Which parts of a tensor index a rank reads, and what it finds out about them."""

from __future__ import annotations

import functools
import uuid

import pytest

from ckptstore.config import StoreConfig
from ckptstore.errors import CheckpointDamaged
from ckptstore.format.manifest import Receipt
from ckptstore.loading.checkpoint_files import CheckpointFiles
from ckptstore.loading.index_read import WHOLE_BYTES, read_own_parts
from ckptstore.state.index.index_file import INDEX_NAME, join_parts
from ckptstore.state.index.part import PartBuilder
from ckptstore.state.tensors.boxes import Box
from ckptstore.storage.memory import MemoryStorage
from ckptstore.transfer import Transfer

RANKS = 8


@functools.cache
def part(rank: int, tensors: int, is_shared: bool) -> bytes:
    builder = PartBuilder(rank)
    builder.add_file(f"state-rank={rank:05d}-00.distcp", [b"slab"])
    builder.add_slab(0, 1 << 20)
    for number in range(tensors):
        row = builder.add_tensor(f"t{number}", "uint8", (RANKS,))
        builder.add_chunk(row, number, Box((rank,), (1,)))
    return builder.encode(is_shared=is_shared)


def index(tensors: int, shared: set[int]) -> bytearray:
    return bytearray(join_parts([part(rank, tensors, rank in shared) for rank in range(RANKS)]))


def parts_read(data: bytearray, rank: int, world_size: int = RANKS) -> list[int] | None:
    storage, config = MemoryStorage(f"memory://{uuid.uuid4().hex}"), StoreConfig()
    storage.write(INDEX_NAME, [memoryview(data)])
    transfer = Transfer(storage, config=config.transfer, retry=config.retry)
    files = CheckpointFiles(storage=storage, transfer=transfer, config=config)
    found = read_own_parts(files, Receipt(INDEX_NAME, len(data), None, 0), rank=rank, world_size=world_size)
    transfer.close()
    return None if found is None else [one.rank for one in found.parts]


def test_a_large_index_is_read_in_parts_unless_most_of_it_is_needed() -> None:
    large = index(10_000, {0})
    assert len(large) > WHOLE_BYTES > len(index(1000, {0}))
    assert [parts_read(large, rank) for rank in (0, 3)] == [[0], [0, 3]]
    assert parts_read(index(1000, {0}), 3) is None
    assert parts_read(index(10_000, {0, 2}), 3) == [0, 2, 3]
    assert {parts_read(index(10_000, {0, 2, 5, 7}), rank) is None for rank in range(RANKS)} == {True}


def test_damage_is_found_in_what_is_read() -> None:
    data, size_bytes = index(10_000, {0}), len(part(0, 10_000, True))
    data[3 * size_bytes + 1000] ^= 1
    assert parts_read(data, 5) == [0, 5]
    with pytest.raises(CheckpointDamaged, match=INDEX_NAME):
        parts_read(data, 3)
    with pytest.raises(CheckpointDamaged, match="damaged directory"):
        parts_read(index(10_000, {0}), 3, world_size=RANKS - 1)
