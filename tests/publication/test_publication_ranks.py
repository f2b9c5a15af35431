"""Ranks that publish together, in every parallel layout, on a disk and in a bucket."""

from __future__ import annotations

from pathlib import Path

import pytest
from forked_ranks import run_ranks
from weights_made import read_model
from weights_ranks import publish_apart, publish_in_layouts

import ckptstore
from ckptstore.testing.s3_server import s3_server

pytestmark = pytest.mark.slow


def check_versions(uri: str, model: Path, expected: list[dict[str, object]], options: dict[str, object]) -> None:
    """A reader that knows nothing of ranks finds each layout's second version."""
    with ckptstore.Subscription(uri, model, **options) as subscription:  # type: ignore[arg-type]
        for number, weights in enumerate(expected, 1):
            applied = subscription.apply(2 * number + 1)
            assert applied.num_deltas == 1
            found = read_model(model)
            if number == len(expected):
                assert {"mine", "stage.0", "stage.1"} <= found.keys()
                assert "3.weight" in found, "two tensors of a mapping are not tied"
            else:
                assert "3.weight" not in found, "a tied one is published once"
            assert {name: found[name] for name in weights if name in found} == {
                name: item for name, item in weights.items() if name in found
            }
            assert set(weights) - {"3.weight"} <= found.keys()


def test_every_layout_publishes_the_same_bytes(tmp_path: Path) -> None:
    uri = str(tmp_path / "published")
    expected, other = run_ranks(2, publish_in_layouts, uri, {}, timeout_seconds=200)
    assert expected == other
    check_versions(uri, tmp_path / "model", expected, {})
    assert len(list((tmp_path / "published").glob("weight_v000003/*.safetensors"))) == 2, "each rank stored its own"


def test_ranks_publish_to_a_bucket(tmp_path: Path) -> None:
    with s3_server(buckets=["test"]) as server:
        options = {"storage_options": server.storage_options}
        expected, _ = run_ranks(2, publish_in_layouts, "s3://test/published", options, timeout_seconds=200)
        check_versions("s3://test/published", tmp_path / "model", expected, options)
        keys = list(server.objects.buckets["test"])
        assert "published/weight_v000009/model.safetensors.index.json" in keys


def test_ranks_that_disagree_all_hear_it(tmp_path: Path) -> None:
    ends = run_ranks(2, publish_apart, str(tmp_path / "published"), timeout_seconds=100)
    for errors in ends:
        shape, numbers, kind, low = errors
        assert "InvalidState" in shape and "a is F32 [3] on rank 1 and F32 [2] on rank 0" in shape  # noqa: PT018
        assert "a has other numbers on rank 1 than on rank 0" in numbers
        assert "InvalidInput" in kind
        assert "Version 4 is not above version 5" in low
    assert len(list((tmp_path / "published").glob("weight_v*"))) == 2
