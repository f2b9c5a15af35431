"""Runs of Ray Train with a fast tier: a node is lost with its disk, and Ray hears of what came into the store."""

from __future__ import annotations

from pathlib import Path

import keeping
import pytest
from checking import check_losses, s3_path
from cluster import RayCluster, fit
from keeping import notes

import ckptstore
from ckptstore import KeepEvery
from ckptstore.testing.s3_server import s3_server

pytestmark = pytest.mark.slow

STEPS = 8


def test_a_lost_node_costs_what_was_trained_since_the_last_fast_checkpoint(cluster: RayCluster, tmp_path: Path) -> None:
    """Of each start the first save is due for the store, and the newest in the end: what the run goes on from is in
    neither. Ray hears of a checkpoint when it is in the store."""
    config = {"notes": str(tmp_path), "steps": STEPS, "parallel": "fsdp", "how": "async", "strike": [1, 5, "lose"]}
    config["fast"] = {"copies": 2, "drain": KeepEvery(steps=1000)}
    with s3_server(buckets=["test"]) as server:
        result = fit(keeping.train, s3_path(server), "fast", config, torch=True, max_failures=1)
        written = [item.path for item in server.log if item.method in ("PUT", "POST") and "/checkpoints/" in item.path]
        assert (tmp_path / "struck").exists()
        assert sorted(" ".join(line) for line in notes(tmp_path, "resumed")) == ["0 2 0", "0 2 4", "1 2 0", "1 2 4"]
        check_losses(tmp_path, STEPS)
        steps = {int(path.partition("/checkpoints/step-")[2][:10]) for path in written}
        assert steps <= {1, 5, 7}
        assert result.metrics["ckptstore_step"] == STEPS - 1
        found = ckptstore.ray.resolve(result.checkpoint)
        assert found.step == STEPS - 1
        assert found.verify().ok
        registered = [metrics["ckptstore_step"] for _, metrics in result.best_checkpoints]
        assert registered == sorted(registered)
        assert registered[-1] == STEPS - 1
        assert {*registered} <= steps
