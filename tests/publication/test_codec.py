"""The codec, the headers and the rules of chains, for any bytes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from ckptstore.errors import CheckpointDamaged, UnsupportedVersion
from ckptstore.extensions.exchange.safetensors import Located, headed, parse_header
from ckptstore.extensions.publication import codec
from ckptstore.extensions.publication.codec import Change, Memory, OverwriteChange, XorChange, digest_of, encode, replay
from ckptstore.extensions.publication.publishing import KeepChains
from ckptstore.extensions.publication.wire import version_of
from ckptstore.retention import Candidate


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that small tensors have several."""
    monkeypatch.setattr(codec, "WINDOW_BYTES", 64)


def test_windows_are_small_here() -> None:
    assert codec.WINDOW_BYTES == 64


@st.composite
def histories(draw: st.DrawFn) -> list[bytes]:
    """A tensor and what it becomes, several times."""
    size = draw(st.sampled_from([0, 1, 7, 8, 63, 64, 65, 200, 1000]))
    found = [draw(st.binary(min_size=size, max_size=size))]
    for _ in range(draw(st.integers(1, 4))):
        following = bytearray(found[-1])
        for place in draw(st.lists(st.integers(0, size - 1), max_size=5)) if size else ():
            following[place] ^= draw(st.integers(0, 255))
        found.append(bytes(following))
    return found


def memory(data: bytes) -> Memory:
    return np.frombuffer(data, np.uint8)


def applied(old: bytes, changes: Sequence[Change], checksum: str = "xxh3-128") -> tuple[bytes, str]:
    """The bytes after some changes, and their digest."""
    result = bytearray(len(old))

    def read(start: int, window: Memory) -> None:
        window[:] = memory(old)[start : start + len(window)]

    def write(start: int, window: Memory) -> None:
        result[start : start + len(window)] = window.tobytes()

    digest = replay(read, write, len(old), changes, checksum)
    return bytes(result), digest


@given(histories(), st.sampled_from(["xxh3-128", "adler32"]))
def test_a_chain_of_deltas_leads_to_the_same_bytes(history: list[bytes], checksum: str) -> None:
    pairs = pairwise(history)
    encoded = [encode(memory(old), memory(new), checksum=checksum) for old, new in pairs]
    for new, (delta, digest) in zip(history[1:], encoded, strict=True):
        assert digest == digest_of(memory(new), checksum)
        assert delta is None or zstandard.ZstdDecompressor().decompress(delta, max_output_size=len(new))
    assert [delta is None for delta, _ in encoded] == [old == new for old, new in pairwise(history)]
    changes = [XorChange(delta, "w") for delta, _ in encoded if delta is not None]
    assert applied(history[0], changes, checksum) == (history[-1], encoded[-1][1])


@given(histories())
def test_positions_and_new_bytes_lead_to_the_same_bytes(history: list[bytes]) -> None:
    old, new = memory(history[0]), memory(history[1])
    places = np.flatnonzero(old != new).astype("<u4")
    plain = len(places).to_bytes(4, "little") + places.tobytes() + new[places].tobytes()
    change = OverwriteChange(zstandard.ZstdCompressor(level=1).compress(plain), "w", size_bytes=len(old))
    assert applied(history[0], [change])[0] == history[1]


@given(histories(), st.data())
def test_a_delta_that_does_not_fit_is_refused(history: list[bytes], data: st.DataObject) -> None:
    old, new = history[0], bytes(byte ^ 1 for byte in history[0])
    delta, _ = encode(memory(old), memory(new), checksum="xxh3-128")
    if delta is None:
        return
    for wrong in (old[:-1], old + b"x"):
        with pytest.raises(CheckpointDamaged, match="w"):
            applied(wrong, [XorChange(delta, "w")])
    cut = data.draw(st.integers(0, len(delta) - 1))
    with pytest.raises(CheckpointDamaged, match="w"):
        applied(old, [XorChange(delta[:cut], "w")])


def test_a_frame_of_several_is_read_to_the_end() -> None:
    pieces = [zstandard.ZstdCompressor().compress(bytes(100)), zstandard.ZstdCompressor().compress(b"\1" * 50)]
    assert applied(bytes(150), [XorChange(b"".join(pieces), "w")])[0] == bytes(100) + b"\1" * 50


@pytest.mark.parametrize("plain", [b"", b"\2\0\0\0" + b"\1\0\0\0" * 2 + b"ab", b"\1\0\0\0" + b"\4\0\0\0" + b"a"])
def test_positions_that_are_none_are_refused(plain: bytes) -> None:
    with pytest.raises(CheckpointDamaged):
        OverwriteChange(zstandard.ZstdCompressor().compress(plain), "w", size_bytes=4)


def test_digests_that_nobody_can_compare_are_refused() -> None:
    with pytest.raises(UnsupportedVersion, match="blake3"):
        digest_of(memory(b""), "blake3")


@given(st.dictionaries(st.text(min_size=1, max_size=5), st.integers(0, 50), max_size=5))
def test_a_header_says_where_everything_lies(sizes: dict[str, int]) -> None:
    sizes.pop("__metadata__", None)
    tensors = {name: Located("U8", (size,), 0, size) for name, size in sizes.items()}
    head, places = headed(tensors, {"a": "b"})
    found = parse_header(head, "x", size_bytes=len(head) + sum(sizes.values()))
    assert (found.tensors, found.metadata, found.size_bytes % 8) == (places, {"a": "b"}, 0)
    if sum(sizes.values()):
        with pytest.raises(CheckpointDamaged):
            parse_header(head, "x", size_bytes=len(head) + sum(sizes.values()) - 1)


@pytest.mark.parametrize(
    ("name", "version"), [("weight_v000012", 12), ("weight_v12", None), ("weight_v000012.tmp", None)]
)
def test_directories_have_six_digits(name: str, version: int | None) -> None:
    assert version_of(name) == version


@given(st.lists(st.booleans(), min_size=1, max_size=20), st.integers(1, 4))
def test_chains_are_kept_whole(anchors: list[bool], keep: int) -> None:
    anchors[0] = True
    candidates = [
        Candidate(
            number=number,
            step=number,
            committed_at=0.0,
            metrics={},
            holds=dict.fromkeys((number,) if is_anchor else (number - 1, number), 1),
        )
        for number, is_anchor in enumerate(anchors, 5)
    ]
    kept = KeepChains(keep).kept(candidates).keys()
    roots = [item.number for item in candidates if len(item.holds) == 1][-keep:]
    assert kept == {item.number for item in candidates if item.number >= roots[0]}
