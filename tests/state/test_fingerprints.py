"""Fingerprints of tensors: equal for equal bytes however they lie, another one for any change."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from ckptstore.state.index.part import DTYPES
from ckptstore.state.tensors import tensor_memory
from ckptstore.state.tensors.tensor_memory import digest_of_host, fingerprint_on_device, fingerprints_of


@pytest.fixture(autouse=True, params=["whole", "in pieces"])
def pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of 48 bytes, so that a few numbers are cut in every way."""
    if request.param == "in pieces":
        monkeypatch.setattr(tensor_memory, "_PIECE_BYTES", 48)


def on_device(tensor: torch.Tensor) -> tuple[int, ...]:
    """What integer arithmetic gives; it is the same on every device."""
    return tuple(fingerprint_on_device(tensor).tolist())


BOTH = pytest.mark.parametrize("take", [on_device, digest_of_host])


@BOTH
def test_every_single_bit_counts(take: Any) -> None:
    base = torch.arange(53, dtype=torch.uint8)  # seven words, the last of them not full
    seen = {take(base)}
    for place in range(53):
        for bit in range(8):
            other = base.clone()
            other[place] ^= 1 << bit
            seen.add(take(other))
    assert len(seen) == 1 + 53 * 8


@BOTH
def test_order_and_place_count(take: Any) -> None:
    words = torch.arange(40, dtype=torch.int64)
    swapped, moved = words.clone(), torch.roll(words, 1)
    swapped[[3, 17]] = swapped[[17, 3]]
    opposite = words.clone()
    opposite[2] += 5
    opposite[3] -= 5
    assert len({take(one) for one in (words, swapped, moved, opposite, torch.zeros(40, dtype=torch.int64))}) == 5


@BOTH
def test_strides_and_views_do_not_count(take: Any) -> None:
    image = torch.randn(3, 4, 5, 2)
    same = [
        image.to(memory_format=torch.channels_last),
        image.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0),
        torch.cat([torch.zeros(1), image.reshape(-1)])[1:].reshape(image.shape),  # begins inside a word
    ]
    assert {take(one) for one in same} == {take(image)}
    numbers = torch.randn(9, 3, dtype=torch.complex64)
    assert take(numbers.conj()) == take(numbers.conj().resolve_conj()) != take(numbers)
    assert take(numbers.conj().imag) == take(numbers.conj().imag.resolve_neg())
    assert take(torch.tensor([1.5]).expand(30)) == take(torch.full((30,), 1.5))
    assert (
        take(torch.tensor([math.nan, -0.0]))
        == take(torch.tensor([math.nan, -0.0]))
        != take(torch.tensor([math.nan, 0.0]))
    )


@BOTH
@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_that_is_stored(take: Any, name: str) -> None:
    dtype = getattr(torch, name)
    raw = torch.randint(0, 2, (16 * 7,), dtype=torch.uint8)
    other = raw.clone()
    other[-1] ^= 1
    assert take(raw.view(dtype)) == take(raw.clone().view(dtype)) != take(other.view(dtype))


def test_the_host_tells_what_it_reads_whole() -> None:
    large = torch.randn(1 << 18)
    strided = torch.stack([large, -large], 1)[:, 0]
    held = {"large": (large,), "strided": (strided,), "one": (torch.ones(3),), "two": (torch.ones(1), large)}
    found = fingerprints_of(held)
    assert found["large"] == found["strided"]
    assert {len(one) for one in found.values()} == {16}
    assert len(set(found.values())) == 3
    assert fingerprints_of({"scalar": (torch.tensor(1),), "empty": ()}).keys() == {"scalar", "empty"}


def test_nothing_depends_on_the_defaults_of_the_process() -> None:
    tensor = torch.arange(9.0)
    plain = on_device(tensor), digest_of_host(tensor)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.inference_mode(), torch.device("meta"):
            assert (on_device(tensor), digest_of_host(tensor)) == plain
    finally:
        torch.set_default_dtype(torch.float32)
