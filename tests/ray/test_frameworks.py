"""The callbacks for Lightning and Hugging Face inside Ray Train: each save is a report, and a run survives a kill."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import frameworks
import pytest
from cluster import RayCluster, fit

import ckptstore

# A run starts its workers twice, on whatever is left of the machine.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def check(result: Any, notes: Path, *, resumed: set[int], steps: list[int]) -> ckptstore.Checkpoint:
    """The run was killed once and went on; Ray's checkpoints stand for those of the store.

    Ray drops a report that it had not fetched when the worker died, so it may know less than the store.
    """
    assert result.error is None
    assert (notes / "killed").exists()
    assert int((notes / "resumed").read_text()) in resumed
    checkpoint = ckptstore.ray.resolve(result.checkpoint)
    assert checkpoint.step == steps[-1]
    assert checkpoint.verify().ok
    reported = [ckptstore.ray.resolve(pointer).step for pointer, _ in result.best_checkpoints]
    assert {*steps[-2:]} <= {*reported} <= {*steps}
    with ckptstore.open_store(Path(result.path, "_ckptstore")) as store:
        assert sorted({live.step for live in store}) == steps
    return checkpoint


@pytest.mark.slow
def test_lightning(cluster: RayCluster, tmp_path: Path) -> None:
    """Saves are asynchronous; those of the Trainer below are not."""
    config = {"notes": str(tmp_path), "kill_at": 10}
    result = fit(frameworks.lightning, tmp_path / "runs", config=config, torch=True, max_failures=1)
    check(result, tmp_path, resumed={4, 8}, steps=[4, 8, 12, 16])
    assert result.metrics["loss"] > 0
    check_columns(result, {"loss", "epoch", "step"})
    assert list(result.metrics_dataframe["step"])[-2:] == [12, 16]


def check_columns(result: Any, expected: set[str]) -> None:
    """Those of Ray's own callback, and one of ckptstore; counts of what went wrong or waited may come."""
    columns = set(result.metrics_dataframe.columns)
    assert expected | {"ckptstore_step"} <= columns
    known = {"ckptstore_step", "ckptstore_waits", "ckptstore_wait_seconds"}
    assert {name for name in columns if name.startswith("ckptstore_")} <= known


@pytest.mark.long
def test_transformers(cluster: RayCluster, tmp_path: Path) -> None:
    config = {"notes": str(tmp_path), "kill_at": 5}
    result = fit(frameworks.transformers, tmp_path / "runs", config=config, torch=True, max_failures=1)
    checkpoint = check(result, tmp_path, resumed={4}, steps=[2, 4, 6, 8])
    check_columns(result, {"loss", "epoch", "step"})
    assert {"model.safetensors", "rng_state_0.pth", "rng_state_1.pth"} <= {receipt.name for receipt in checkpoint.files}
