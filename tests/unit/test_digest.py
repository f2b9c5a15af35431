"""CRC32C of files and blocks: the algorithm itself, and that joining stretches gives what one pass gives."""

from __future__ import annotations

import random
from array import array
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptstore.format.digest import (
    BLOCK_BYTES,
    FileDigest,
    SegmentDigest,
    block_borders,
    combine,
    crc32c,
    crc32c_of,
    join,
    to_hex,
)


def reference_crc32c(data: bytes) -> int:
    """Bit by bit, as RFC 3720 defines it."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def test_the_check_value_of_the_algorithm() -> None:
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(b"") == 0
    assert crc32c(bytes(32)) == 0x8A9136AA  # RFC 3720, B.4


@given(st.binary(max_size=200))
def test_it_is_crc32c(data: bytes) -> None:
    assert crc32c(data) == reference_crc32c(data)
    assert crc32c(memoryview(data)) == crc32c(bytearray(data)) == crc32c(data)


@given(st.binary(max_size=500), st.lists(st.integers(0, 500), max_size=6), st.randoms(use_true_random=False))
def test_stretches_in_any_order_join_to_the_whole(data: bytes, cuts: list[int], order: random.Random) -> None:
    borders = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    segments = [SegmentDigest(start, end - start, crc32c(data[start:end])) for start, end in pairwise(borders)]
    order.shuffle(segments)
    assert join(segments) == crc32c(data)
    total = 0
    for segment in sorted(segments):
        total = crc32c(data[segment.offset : segment.offset + segment.size_bytes], total)
    assert total == crc32c(data)


def test_a_gap_and_an_overlap_are_refused() -> None:
    with pytest.raises(ValueError, match="gap"):
        join([SegmentDigest(0, 4, 1), SegmentDigest(5, 4, 2)])
    with pytest.raises(ValueError, match="gap"):
        join([SegmentDigest(0, 4, 1), SegmentDigest(3, 4, 2)])
    assert join([]) == 0


def test_combine_takes_a_second_stretch_of_any_size() -> None:
    data = bytes(range(256)) * 64
    for cut in (0, 1, 255, 4096, len(data)):
        assert combine(crc32c(data[:cut]), crc32c(data[cut:]), len(data) - cut) == crc32c(data)


def test_block_borders_begin_at_the_payload() -> None:
    assert list(block_borders(10, 2 * BLOCK_BYTES + 1)) == [
        10,
        10 + BLOCK_BYTES,
        10 + 2 * BLOCK_BYTES,
        11 + 2 * BLOCK_BYTES,
    ]
    assert list(block_borders(7, 0)) == [7]


def test_hexadecimal_has_eight_digits() -> None:
    assert to_hex(0x1A) == "0000001a"


SIZES = st.sampled_from([0, 1, 5, 4096, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 2 * BLOCK_BYTES + 12_345])
DATA = random.Random(1).randbytes(12 * BLOCK_BYTES)


@given(
    gaps_and_sizes=st.lists(st.tuples(st.sampled_from([0, 1, 100, 4096, 70_000]), SIZES), max_size=4),
    tail_bytes=st.sampled_from([0, 1, 50_000]),
    step_bytes=st.sampled_from([50_000, 1 << 18, BLOCK_BYTES, 3 * BLOCK_BYTES + 11]),
    view_bytes=st.sampled_from([30_000, 1 << 20, 1 << 30]),
    order=st.randoms(use_true_random=False),
)
def test_a_file_is_digested_in_any_order_of_steps(
    gaps_and_sizes: list[tuple[int, int]],
    tail_bytes: int,
    step_bytes: int,
    view_bytes: int,
    order: random.Random,
) -> None:
    payloads: list[tuple[int, int]] = []
    end = 0
    for gap, size in gaps_and_sizes:
        payloads.append((end + gap, size))
        end += gap + size
    data = memoryview(DATA)[: end + tail_bytes]
    digest = FileDigest(payloads)
    steps = [(start, data[start : start + step_bytes]) for start in range(0, len(data), step_bytes)]
    order.shuffle(steps)
    for start, step in steps:
        digest.add(start, [step[at : at + view_bytes] for at in range(0, len(step), view_bytes)])
    assert digest.crc32c() == crc32c(data)
    expected = [
        [crc32c(data[at : min(at + BLOCK_BYTES, offset + size)]) for at in range(offset, offset + size, BLOCK_BYTES)]
        for offset, size in payloads
    ]
    assert [list(array("I", crcs)) for crcs in digest.block_crcs()] == expected


def test_block_digests_are_little_endian() -> None:
    digest = FileDigest([(0, 9)])
    digest.add(0, [memoryview(b"123456789")])
    assert digest.block_crcs() == (bytes.fromhex("839206e3"),)


@given(size_bytes=st.integers(0, 3 * BLOCK_BYTES), gap=st.integers(0, 5000), offset=st.integers(0, 2 * BLOCK_BYTES))
def test_what_was_added_has_a_digest_too(size_bytes: int, gap: int, offset: int) -> None:
    data = memoryview(DATA)[:size_bytes]
    for payloads in ([], [(gap, 4 * BLOCK_BYTES)]):
        added = FileDigest(payloads).add(offset, [data[: size_bytes // 3], data[size_bytes // 3 :]])
        assert added == crc32c(data) == crc32c_of([data[: size_bytes // 2], data[size_bytes // 2 :]])
