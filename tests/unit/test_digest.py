"""Digests of files and blocks: the algorithms themselves, and that joining stretches gives what one pass gives."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptstore.errors import UnsupportedVersion
from ckptstore.format.digest import (
    ALGORITHMS,
    BLOCK_BYTES,
    Digest,
    FileDigest,
    Hasher,
    algorithm_of_code,
    file_digest,
    unpacked,
)

SIZES = st.sampled_from([0, 1, 5, 4096, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 2 * BLOCK_BYTES + 12_345])
DATA = random.Random(1).randbytes(12 * BLOCK_BYTES)


def placed(gaps_and_sizes: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Payloads one after another, as offsets and sizes."""
    found, end = [], 0
    for gap, size in gaps_and_sizes:
        found.append((end + gap, size))
        end += gap + size
    return found


PAYLOADS = st.lists(st.tuples(st.sampled_from([0, 1, 100, 4096, 70_000]), SIZES), max_size=4).map(placed)

every_algorithm = pytest.mark.parametrize("algorithm", ALGORITHMS)


def test_the_check_values_of_the_algorithms() -> None:
    assert str(Digest.of(algorithm="xxh3-128")) == "xxh3-128:99aa06d3014798d86001c324468d497f"  # of the reference
    assert str(Digest.of(b"123456789")) == "crc32c:e3069283"
    assert str(Digest.of()) == "crc32c:00000000"
    assert str(Digest.of(bytes(32))) == "crc32c:8a9136aa"  # RFC 3720, B.4


@every_algorithm
@given(data=st.binary(max_size=500), cut=st.integers(0, 500))
def test_bytes_may_come_in_pieces(algorithm: str, data: bytes, cut: int) -> None:
    whole = Digest.of(data, algorithm=algorithm)
    hasher = Hasher(algorithm)
    hasher.update(data[:cut])
    hasher.update(data[cut:])
    assert hasher.digest() == Digest.of(data[:cut], data[cut:], algorithm=algorithm) == whole
    assert whole.like(data) == whole
    assert (whole.like(data + b"x") == whole) is False


@given(st.binary(max_size=500), st.lists(st.integers(0, 500), max_size=6))
def test_stretches_join_to_the_whole(data: bytes, cuts: list[int]) -> None:
    borders = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    total = Digest.of()
    for start, end in pairwise(borders):
        total = total.followed_by(Digest.of(data[start:end]), end - start)
    assert total == Digest.of(data)


def test_a_gap_and_an_overlap_are_refused() -> None:
    for second in (3, 5):
        digest = FileDigest()
        digest.add(0, [memoryview(b"1234")])
        digest.add(second, [memoryview(b"1234")])
        with pytest.raises(ValueError, match="gap"):
            digest.digest()
    assert FileDigest().digest() == Digest.of()


@every_algorithm
def test_the_text_of_a_digest_is_read_strictly(algorithm: str) -> None:
    digest = Digest.of(b"data", algorithm=algorithm)
    assert Digest.parse(str(digest)) == digest
    digits = digest.hex
    wrong = ["", digits[1:], f"{digits}0", digits.upper() + "F", f" {digits}", f"{digits}\n", f"0x{digits[2:]}"]
    wrong += [f"+{digits[1:]}", f"{digits[:4]}_{digits[5:]}", "é" * len(digits)]
    for text in [digits, f"{algorithm.upper()}:{digits}", 7, None, [], *(f"{algorithm}:{one}" for one in wrong)]:
        with pytest.raises(ValueError, match="digest"):
            Digest.parse(text)


@given(payloads=PAYLOADS, tail_bytes=st.integers(0, 5000), step_bytes=st.sampled_from([50_000, 1 << 20, 3_000_007]))
def test_a_file_is_digested_in_its_order_where_digests_do_not_combine(
    payloads: list[tuple[int, int]], tail_bytes: int, step_bytes: int
) -> None:
    data = memoryview(DATA)[: (sum(payloads[-1]) if payloads else 0) + tail_bytes]
    digest = file_digest(payloads, algorithm="xxh3-128")
    assert digest.needs_order
    for start in range(0, len(data), step_bytes):
        step = data[start : start + step_bytes]
        assert digest.add(start, [step[:7], step[7:]]) is None
    assert digest.digest() == Digest.of(data, algorithm="xxh3-128")
    assert [unpacked("xxh3-128", blocks) for blocks in digest.block_digests()] == [
        [
            Digest.of(data[at : min(at + BLOCK_BYTES, offset + size)], algorithm="xxh3-128")
            for at in range(offset, offset + size, BLOCK_BYTES)
        ]
        for offset, size in payloads
    ]
    with pytest.raises(ValueError, match="come after"):
        digest.add(len(data) + 1, [data[:1]])
    with pytest.raises(ValueError, match="cannot be combined"):
        digest.digest().followed_by(digest.digest(), 1)


def test_an_unknown_algorithm_is_said_to_be_of_a_later_version() -> None:
    with pytest.raises(UnsupportedVersion, match="sha-9"):
        Digest.parse("sha-9:00")
    with pytest.raises(UnsupportedVersion) as caught:
        algorithm_of_code(200, file="x")
    assert caught.value.file == "x"


@given(
    payloads=PAYLOADS,
    tail_bytes=st.sampled_from([0, 1, 50_000]),
    step_bytes=st.sampled_from([50_000, 1 << 18, BLOCK_BYTES, 3 * BLOCK_BYTES + 11]),
    view_bytes=st.sampled_from([30_000, 1 << 20, 1 << 30]),
    order=st.randoms(use_true_random=False),
)
def test_a_file_is_digested_in_any_order_of_steps(
    payloads: list[tuple[int, int]],
    tail_bytes: int,
    step_bytes: int,
    view_bytes: int,
    order: random.Random,
) -> None:
    data = memoryview(DATA)[: (sum(payloads[-1]) if payloads else 0) + tail_bytes]
    digest = FileDigest(payloads)
    steps = [(start, data[start : start + step_bytes]) for start in range(0, len(data), step_bytes)]
    order.shuffle(steps)
    for start, step in steps:
        digest.add(start, [step[at : at + view_bytes] for at in range(0, len(step), view_bytes)])
    assert digest.digest() == Digest.of(data)
    expected = [
        [Digest.of(data[at : min(at + BLOCK_BYTES, offset + size)]) for at in range(offset, offset + size, BLOCK_BYTES)]
        for offset, size in payloads
    ]
    assert [unpacked("crc32c", blocks) for blocks in digest.block_digests()] == expected


def test_block_digests_are_little_endian() -> None:
    digest = FileDigest([(0, 9)])
    digest.add(0, [memoryview(b"123456789")])
    assert digest.block_digests() == (bytes.fromhex("839206e3"),)


@given(size_bytes=st.integers(0, 3 * BLOCK_BYTES), gap=st.integers(0, 5000), offset=st.integers(0, 2 * BLOCK_BYTES))
def test_what_was_added_has_a_digest_too(size_bytes: int, gap: int, offset: int) -> None:
    data = memoryview(DATA)[:size_bytes]
    for payloads in ([], [(gap, 4 * BLOCK_BYTES)]):
        added = FileDigest(payloads).add(offset, [data[: size_bytes // 3], data[size_bytes // 3 :]])
        assert added == Digest.of(data)
