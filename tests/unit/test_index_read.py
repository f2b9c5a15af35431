"""Which parts of a tensor index a rank reads, and what it finds out about them."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

import pytest

from ckptstore.config import StoreConfig
from ckptstore.errors import CheckpointDamaged, UnsupportedVersion
from ckptstore.format.digest import Digest
from ckptstore.loading import index_read
from ckptstore.loading.index_read import HEAD_BYTES, IndexReader
from ckptstore.state.index.outline import INDEX_NAME, Outline, PartFile, Span, encode_table
from ckptstore.state.index.part import PartBuilder, Tensor
from ckptstore.state.tensors.boxes import Box
from ckptstore.storage.memory import MemoryStorage
from ckptstore.transfer import RangeRead, Transfer

RANKS = 8


def part(rank: int, tensors: int) -> bytes:
    builder = PartBuilder(rank)
    builder.add_file(f"state-rank={rank:05d}-00.distcp", [b"slab"])
    builder.add_slab(0, 1 << 20)
    for number in range(tensors):
        row = builder.add_tensor(f"t{number:05d}", "uint8", (RANKS,))
        builder.add_chunk(row, number, Box((rank,), (1,)))
    return builder.encode()


def index_file(tensors: int) -> tuple[bytearray, int]:
    """An index whose first part has values for all, and where its parts begin."""
    parts = [part(rank, tensors) for rank in range(RANKS)]
    table = encode_table([Tensor(f"t{number:05d}", "uint8", (RANKS,)) for number in range(tensors)])
    files = tuple(PartFile(len(one), Digest.of(one)) for one in parts)
    spans = tuple(Span(rank, 0, tensors - 1) for rank in range(RANKS))
    outline = Outline(files, table, common=(0,), spans=spans, is_packed=True).encode()
    return bytearray(b"".join([outline, *parts])), len(outline)


def opened(data: bytearray, rank: int | None, *, digest: Digest | None = None) -> tuple[list[int], int]:
    """The ranks whose parts were read, and by how many requests."""
    storage, config, requests = MemoryStorage(f"memory://{uuid.uuid4().hex}"), StoreConfig(), list[RangeRead]()
    storage.write(INDEX_NAME, [memoryview(data)])
    transfer = Transfer(storage, config=config.transfer, retry=config.retry)

    def read(ranges: list[RangeRead]) -> None:
        requests.extend(ranges)
        transfer.read(ranges)

    try:
        found = IndexReader(read, "", {INDEX_NAME: len(data)}.get, digest).opened(rank=rank)
    finally:
        transfer.close()
    return [one.rank for one in found.parts], len(requests)


def test_a_small_index_is_read_at_once_and_a_large_one_in_parts() -> None:
    small, large = index_file(1000)[0], index_file(10_000)[0]
    assert len(large) > HEAD_BYTES > len(small)
    assert opened(small, 3, digest=Digest.of(small)) == (list(range(RANKS)), 1)
    assert opened(large, 0) == ([0], 1), "it lies within the first bytes"
    assert opened(large, 7) == ([0, 7], 2)
    assert opened(large, None) == ([0], 1)


def test_what_the_parts_that_were_read_have_needs_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_read, "HEAD_BYTES", 64)
    data = index_file(10)[0]

    def read(ranges: Sequence[RangeRead]) -> None:
        for item in ranges:
            item.views[0][:] = data[item.offset :][: item.size_bytes]

    index = IndexReader(read, "", {INDEX_NAME: len(data)}.get).opened(rank=3)
    own, more = Box((3,), (1,)), Box((2,), (2,))
    assert not index.lacking("t00001", 3, own)
    assert [chunk.box for chunk in index.chunks("t00001", 3, own)] == [own]
    assert index.lacking("t00001", 3, more) == {1, 2, 4, 5, 6, 7}
    with pytest.raises(RuntimeError, match="are needed"):
        index.chunks("t00001", 3, more)


def test_damage_is_found_in_what_is_read() -> None:
    data, start = index_file(10_000)
    data[len(data) - 1000] ^= 1
    assert opened(data, 5)[0] == [0, 5]
    with pytest.raises(CheckpointDamaged, match=INDEX_NAME):
        opened(data, 7)
    for place in (start + 100, start - 100, 20, 9, 1):
        harmed = index_file(10_000)[0]
        harmed[place] ^= 1
        with pytest.raises(CheckpointDamaged, match=INDEX_NAME):
            opened(harmed, 3)
    whole, digest = index_file(10_000)[0], Digest.of(index_file(10_000)[0])
    for place in (0, 12, 13, 19, 28):
        harmed = bytearray(whole)
        harmed[place] ^= 2
        with pytest.raises(CheckpointDamaged, match=INDEX_NAME):
            opened(harmed, 3, digest=digest)
    whole[12] = 2
    with pytest.raises(UnsupportedVersion, match=INDEX_NAME):
        opened(whole, 3, digest=Digest.of(whole))
    for size_bytes in (len(data) - 1, HEAD_BYTES, 20):
        with pytest.raises(CheckpointDamaged, match=INDEX_NAME):
            opened(index_file(10_000)[0][:size_bytes], 3)
