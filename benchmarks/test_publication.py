"""What a version of weights costs of which 2 % of the numbers changed: rates, bytes, and through a bucket.

    pytest benchmarks/test_publication.py -s

Rates are of one thread's processor time, the medians of several runs; `CKPTSTORE_BENCH=full` takes 1 GiB. Times through
the bucket are of the clock, and include a server in memory on the same processors.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np
import pytest
import torch
from sizes import FULL, ROUNDS

import ckptstore
from ckptstore.publication.codec import Memory, XorChange, encode, replay
from ckptstore.publication.wire import STRONG, WEAK
from ckptstore.testing.s3_server import s3_server

SIZE_BYTES = (1024 if FULL else 128) << 20
TENSOR_BYTES = 32 << 20
CHANGED_SHARE = 0.02
CWTRAIN = Path(__file__).parents[1] / ".servers/cwtrain"

Weights = dict[str, torch.Tensor]


def some_weights() -> Weights:
    """Tensors of bfloat16, as many as the size asks for."""
    generator = torch.Generator().manual_seed(0)
    shape = (TENSOR_BYTES // 2 // 1024, 1024)
    return {
        f"layers.{number}": (torch.randn(shape, generator=generator) * 0.02).bfloat16()
        for number in range(SIZE_BYTES // TENSOR_BYTES)
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


def rate(call: Callable[[], object], size_bytes: int) -> str:
    """Return GB for each second of this thread's processor."""
    seconds = []
    for _ in range(max(3, ROUNDS)):
        before = time.thread_time()
        call()
        seconds.append(time.thread_time() - before)
    return f"{size_bytes / median(seconds) / 1e9:.2f} GB/s"


@pytest.mark.parametrize("checksum", [STRONG, WEAK])
def test_rates_of_one_processor(checksum: str) -> None:
    tensor = next(iter(some_weights().values()))
    old, new = memory_of(tensor), memory_of(stepped({"w": tensor}, 1)["w"])
    delta, digest = encode(old, new, checksum=checksum)
    assert delta is not None
    out = np.empty_like(new)

    def read(start: int, window: Memory) -> None:
        window[:] = old[start : start + len(window)]

    def write(start: int, window: Memory) -> None:
        out[start : start + len(window)] = window

    def apply() -> None:
        assert replay(read, write, len(old), [XorChange(delta, "w")], checksum) == digest

    print(
        f"\n{checksum}: encode {rate(lambda: encode(old, new, checksum=checksum), len(new))}, unchanged "
        f"{rate(lambda: encode(old, old, checksum=checksum), len(new))}, apply {rate(apply, len(new))}, "
        f"{len(delta) / len(new):.2%} of the bytes"
    )
    assert out.tobytes() == new.tobytes()


def test_through_a_bucket(tmp_path: Path) -> None:
    old = some_weights()
    with s3_server(buckets=["test"]) as server:
        options = {"storage_options": server.storage_options}
        with (
            ckptstore.open_publication("s3://test/weights", directories=False, **options) as publication,
            ckptstore.Subscription("s3://test/weights", tmp_path / "model", **options) as subscription,
        ):
            rows = []
            for version in range(1, 3 + max(2, ROUNDS)):
                began = time.monotonic()
                stored = publication.publish(version, old)
                published = time.monotonic()
                applied = subscription.apply()
                rows.append((published - began, time.monotonic() - published, stored.size_bytes, applied.num_deltas))
                old = stepped(old, version)
    (
        (full, pulled, size, _),
        *_,
    ) = rows
    deltas = rows[2:]  # the first of them makes the second copy in memory
    print(
        f"\n{SIZE_BYTES >> 20} MiB: full {full:.2f} s to publish and {pulled:.2f} s to pull, {size / SIZE_BYTES:.1%}; "
        f"a delta {median(row[0] for row in deltas):.2f} s and {median(row[1] for row in deltas):.2f} s, "
        f"{deltas[0][2] / SIZE_BYTES:.2%}"
    )
    assert all(row[3] == 1 for row in deltas)


def test_beside_cwtrain(tmp_path: Path) -> None:
    """Their writer and reader work on files; ours on weights in memory, and on files."""
    if not CWTRAIN.is_dir():
        pytest.skip("cwtrain is not installed: make servers")
    from safetensors.torch import save_file

    sys.path.append(str(CWTRAIN))
    from cwtrain.hotload import WeightMirror
    from cwtrain.hotload.delta import write_delta

    old = some_weights()
    new = stepped(old, 1)
    for name, weights in (("old", old), ("new", new)):
        (tmp_path / name).mkdir()
        save_file(weights, tmp_path / name / "model.safetensors", metadata={"format": "pt"})
        (tmp_path / name / "config.json").write_text("{}")
    mirror = WeightMirror.create(tmp_path / "old", tmp_path / "mirror", version="000000")
    began = time.monotonic()
    theirs = write_delta(
        *(tmp_path / name for name in ("old", "new", "delta")), version="000001", base_version="000000"
    )
    written = time.monotonic()
    mirror.apply_delta(tmp_path / "delta")
    ended = time.monotonic()
    with (
        ckptstore.open_publication(tmp_path / "published", checksum="adler32") as publication,
        ckptstore.Subscription(tmp_path / "published", tmp_path / "model") as subscription,
    ):
        publication.publish(0, old)
        subscription.apply()
        before = time.monotonic()
        publication.publish(1, new)
        published = time.monotonic()
        subscription.apply()
        pulled = time.monotonic()
    ours = sum(file.stat().st_size for file in (tmp_path / "published" / "weight_v000001").iterdir())
    print(
        f"\n{SIZE_BYTES >> 20} MiB on a disk: ckptstore {published - before:.2f} s and {pulled - published:.2f} s, "
        f"cwtrain {written - began:.2f} s and {ended - written:.2f} s; wire {ours / theirs.wire_bytes:.3f} of theirs"
    )
    assert ours < 1.1 * theirs.wire_bytes
