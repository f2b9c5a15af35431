"""Interoperate with CoreWeave's reader and writer of the same format, as they come, byte by byte."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from weights_made import Weights, bytes_of, changed, read_model, some_weights

import ckptstore
from ckptstore.errors import CheckpointGone

PACKAGES = Path(__file__).parents[2] / ".servers/cwtrain"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cwtrain() -> Iterator[Any]:
    """Its package `hotload`."""
    if not PACKAGES.is_dir():
        pytest.skip("cwtrain is not installed: make servers")
    sys.path.append(str(PACKAGES))
    try:
        import cwtrain.hotload.delta

        yield cwtrain.hotload
    finally:
        sys.path.remove(str(PACKAGES))


def full(path: Path, weights: Weights) -> Path:
    """A model as Hugging Face's libraries save it."""
    path.mkdir(parents=True)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text("{}")
    return path


def history() -> list[Weights]:
    """Changes, a version that changes nothing, tensors that come and go, other dtypes and shapes."""
    random, found = Random(3), [some_weights()]
    for number in range(1, 12):
        weights = dict(found[-1])
        if number == 4:
            weights["model.layers.1.mlp.experts.0.up_proj.weight"] = torch.randn(4, 5)
        elif number == 6:
            del weights["model.norm.weight"]
        elif number == 7:
            weights["odd"] = weights["odd"].double()
        elif number == 8:
            weights["odd"] = weights["odd"].reshape(2, 2)
        elif number != 2:
            weights = changed(weights, random, num=3)
        found.append(weights)
    return found


def test_their_mirror_holds_what_we_publish(cwtrain: Any, tmp_path: Path) -> None:
    from cwtrain.hotload.delta import checkpoint_checksums

    place, model = tmp_path / "published", full(tmp_path / "config", {"unused": torch.ones(1)})
    with ckptstore.open_publication(
        place, anchor_every=2, keep=99, checksum="adler32", config_from=model
    ) as publication:
        for version, weights in enumerate(history(), 1):
            publication.publish(version, weights)
    mirror, kinds = None, []
    for version, weights in enumerate(history(), 1):
        directory = place / f"weight_v{version:06d}"
        info = cwtrain.inspect_snapshot(directory, allow_empty_delta=True)
        kinds.append(info.type.name[0])
        if info.is_incremental:
            assert mirror is not None
            mirror.apply_delta(directory)
        else:
            mirror = cwtrain.WeightMirror.create(directory, tmp_path / "mirror", version=f"{version:06d}")
            assert mirror.checksums == checkpoint_checksums(directory)
        assert read_model(tmp_path / "mirror") == bytes_of(weights), f"version {version}"
    assert "".join(kinds) == "FIIFFIFFFIIF"


def test_we_pull_what_they_write(cwtrain: Any, tmp_path: Path) -> None:
    from cwtrain.hotload.delta import write_delta, write_full_snapshot

    random, place, weights = Random(5), tmp_path / "published", some_weights()
    models = [full(tmp_path / "base", weights)]
    wanted = []
    for version in range(1, 8):
        weights = changed(weights, random, num=3) if version != 3 else weights
        wanted.append(bytes_of(weights))
        models.append(full(tmp_path / f"whole-{version}", weights))
        directory = place / f"weight_v{version:06d}"
        if version == 5:
            write_full_snapshot(models[-1], directory)
        else:
            write_delta(*models[-2:], directory, version=f"{version:06d}", base_version=f"{version - 1:06d}")
    with ckptstore.Subscription(place, tmp_path / "model") as subscription, pytest.raises(CheckpointGone, match="base"):
        subscription.apply(4)
    with ckptstore.Subscription(place, tmp_path / "model", base=models[0]) as subscription:
        for version, num_deltas in ((1, 1), (4, 3), (5, 0), (6, 1), (7, 1), (3, 3)):
            applied = subscription.apply(version)
            assert read_model(tmp_path / "model") == wanted[version - 1], f"version {version}"
            assert applied.num_deltas == num_deltas
        assert (tmp_path / "model" / "config.json").exists()
        assert subscription.wait() == 7


def test_our_wire_is_as_small_as_theirs(cwtrain: Any, tmp_path: Path) -> None:
    from cwtrain.hotload.delta import write_delta

    random = torch.Generator().manual_seed(1)
    old = {f"w{number}": torch.randn(500, 400, generator=random).bfloat16() for number in range(4)}
    new = {}
    for name, tensor in old.items():
        raw = tensor.clone().view(torch.int16)
        raw[torch.rand(raw.shape, generator=random) < 0.02] ^= 1
        new[name] = raw.view(torch.bfloat16)
    theirs = write_delta(
        full(tmp_path / "old", old), full(tmp_path / "new", new), tmp_path / "delta", version="1", base_version="0"
    )
    with ckptstore.open_publication(tmp_path / "published") as publication:
        publication.publish(0, old)
        publication.publish(1, new)
    ours = sum(file.stat().st_size for file in (tmp_path / "published" / "weight_v000001").iterdir())
    assert ours < 1.1 * theirs.wire_bytes
