"""What a version of weights costs of which 2 % of the numbers changed: the codec on one thread, and from a trainer's
memory to a reader's directory through a bucket and a disk, beside a full version and cwtrain."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zstandard
from sizes import FULL, Take, group, turns

import ckptstore
from ckptstore.extensions.publication.codec import WINDOW_BYTES, Memory, XorChange, encode, replay
from ckptstore.extensions.publication.wire import STRONG
from ckptstore.testing.s3_server import s3_server
from ckptstore.tools.bench.figures.report import OURS, Role, WorkloadOutcome
from ckptstore.tools.bench.measure import Meter

SIZE_BYTES = (1024 if FULL else 64) << 20
TENSOR_BYTES = 32 << 20
CHANGED_SHARE = 0.02
CWTRAIN = Path(__file__).parents[1] / ".servers/cwtrain"
THEIRS = "cwtrain"
WHOLE = "ckptstore, full version"

Weights = dict[str, torch.Tensor]


def some_weights(size_bytes: int = SIZE_BYTES) -> Weights:
    """Tensors of bfloat16, as many as the size asks for."""
    generator = torch.Generator().manual_seed(0)
    shape = (TENSOR_BYTES // 2 // 1024, 1024)
    return {
        f"layers.{number}": (torch.randn(shape, generator=generator) * 0.02).bfloat16()
        for number in range(size_bytes // TENSOR_BYTES)
    }


def stepped(weights: Weights, seed: int) -> Weights:
    """The same after a step that moves some numbers by a few of their last bits, anywhere."""
    generator, found = torch.Generator().manual_seed(seed), {}
    for name, tensor in weights.items():
        raw = tensor.clone().view(torch.int16)
        hit = torch.rand(raw.shape, generator=generator) < CHANGED_SHARE
        raw[hit] ^= torch.randint(1, 4, (int(hit.sum()),), generator=generator, dtype=torch.int16)
        found[name] = raw.view(torch.bfloat16)
    return found


def memory_of(tensor: torch.Tensor) -> Memory:
    return tensor.view(torch.uint8).numpy().reshape(-1)


def timed(name: str, role: Role, call: Callable[[], object], size_bytes: int) -> tuple[WorkloadOutcome, int]:
    with Meter() as meter:
        call()
    return WorkloadOutcome.of(name, [meter.sample()], role=role), size_bytes


@pytest.fixture(scope="module")
def pair() -> tuple[Memory, Memory]:
    """A tensor before a step and after it."""
    tensors = some_weights(TENSOR_BYTES)
    return memory_of(next(iter(tensors.values()))), memory_of(next(iter(stepped(tensors, 1).values())))


@group("Encode a tensor of which 2 % changed")
@pytest.mark.parametrize("turn", turns())
@pytest.mark.parametrize("name", [OURS, "ckptstore, nothing changed", "zstd alone"])
def test_encode(take: Take, pair: tuple[Memory, Memory], name: str, turn: int) -> None:
    old, new = pair
    difference = old ^ new
    calls: Mapping[str, Callable[[], object]] = {
        OURS: lambda: encode(old, new, checksum=STRONG),
        "ckptstore, nothing changed": lambda: encode(old, old, checksum=STRONG),
        "zstd alone": lambda: zstandard.ZstdCompressor(level=1).compress(difference),
    }
    take(lambda: timed(name, "limit" if name == "zstd alone" else OURS, calls[name], TENSOR_BYTES))


@group("Apply a delta to a tensor of which 2 % changed")
@pytest.mark.parametrize("turn", turns())
@pytest.mark.parametrize("name", [OURS, "zstd alone"])
def test_apply(take: Take, pair: tuple[Memory, Memory], name: str, turn: int) -> None:
    old, new = pair
    delta, digest = encode(old, new, checksum=STRONG)
    assert delta is not None
    out = np.empty_like(new)

    def read(start: int, window: Memory) -> None:
        window[:] = old[start : start + len(window)]

    def write(start: int, window: Memory) -> None:
        out[start : start + len(window)] = window

    def apply() -> None:
        assert replay(read, write, len(old), [XorChange(delta, "w")], STRONG) == digest

    if name == OURS:
        take(lambda: timed(name, OURS, apply, TENSOR_BYTES), delta_share=len(delta) / TENSOR_BYTES)
        assert out.tobytes() == new.tobytes()
    else:
        scratch = bytearray(WINDOW_BYTES)

        def decompress() -> None:
            with zstandard.ZstdDecompressor().stream_reader(delta) as reader:
                while reader.readinto(scratch):
                    pass

        take(lambda: timed(name, "limit", decompress, TENSOR_BYTES))


@contextmanager
def trainer_and_reader(
    place: str | Path, path: Path, *, name: str, **options: Any
) -> Iterator[Callable[[Weights], None]]:
    """Publish the next version and apply it; the first one is full, and each later one a delta, or all are full."""
    anchor_every = 0 if name == WHOLE else 20
    with (
        ckptstore.open_publication(place, directories=False, anchor_every=anchor_every, **options) as publication,
        ckptstore.Subscription(place, path, **options) as subscription,
    ):
        versions = count(1)

        def bring(weights: Weights) -> None:
            version = next(versions)
            publication.publish(version, weights)
            assert subscription.apply().num_deltas == (name != WHOLE and version > 1)

        yield bring


@cache
def three_versions() -> Sequence[Weights]:
    """Made once for all turns, since that takes longer than they do."""
    first = some_weights()
    second = stepped(first, 1)
    return first, second, stepped(second, 2)


def take_a_turn(take: Take, name: str, bring: Callable[[Weights], None]) -> None:
    """The third version: it finds its threads and memory, and nothing of the others on its way to the disk."""
    *before, weights = three_versions()
    for one in before:
        bring(one)
    os.sync()
    take(lambda: timed(name, OURS if name == OURS else "peer", lambda: bring(weights), SIZE_BYTES))


@pytest.mark.long
@group("Bring 2 % of the weights through S3 in memory")
@pytest.mark.parametrize("turn", turns(3))
@pytest.mark.parametrize("name", [OURS, WHOLE])
def test_through_a_bucket(take: Take, tmp_path: Path, name: str, turn: int) -> None:
    with (
        s3_server(buckets=["test"]) as server,
        trainer_and_reader(
            "s3://test/w", tmp_path / "model", name=name, storage_options=server.storage_options
        ) as bring,
    ):
        take_a_turn(take, name, bring)


@group("Bring 2 % of the weights through a disk")
@pytest.mark.parametrize("turn", turns(3))
@pytest.mark.parametrize("name", [OURS, WHOLE, THEIRS])
def test_through_a_disk(take: Take, tmp_path: Path, name: str, turn: int) -> None:
    if name != THEIRS:
        with trainer_and_reader(tmp_path / "published", tmp_path / "model", name=name) as bring:
            take_a_turn(take, name, bring)
        return
    if not CWTRAIN.is_dir():
        pytest.skip("cwtrain is not installed: make servers")
    from safetensors.torch import save_file

    sys.path.append(str(CWTRAIN))
    from cwtrain.hotload import WeightMirror
    from cwtrain.hotload.delta import write_delta

    weights = some_weights()
    (tmp_path / "0").mkdir()
    save_file(weights, tmp_path / "0/model.safetensors", metadata={"format": "pt"})
    (tmp_path / "0/config.json").write_text("{}")
    mirror = WeightMirror.create(tmp_path / "0", tmp_path / "mirror", version="000000")
    versions = count(1)

    def theirs(weights: Weights) -> None:
        """Their writer compares files, so the weights go there first."""
        number = next(versions)
        old, new, delta = tmp_path / f"{number - 1}", tmp_path / f"{number}", tmp_path / f"delta{number}"
        new.mkdir()
        save_file(weights, new / "model.safetensors", metadata={"format": "pt"})
        (new / "config.json").write_text("{}")
        write_delta(old, new, delta, version=f"{number:06}", base_version=f"{number - 1:06}")
        mirror.apply_delta(delta)

    take_a_turn(take, name, theirs)
