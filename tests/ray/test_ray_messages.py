"""Reports of metrics in real runs: what they cost, and what becomes of those that are missing."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import telling
from checking import s3_path
from cluster import RayCluster, fit
from keeping import notes

from ckptstore.testing.s3_server import s3_server

pytestmark = pytest.mark.slow


def test_metrics_alone_cost_the_storage_no_more_than_with_ray(cluster: RayCluster) -> None:
    num_requests = []
    with s3_server(buckets=["test"]) as server:
        for train in (telling.report_with_ray_alone, telling.report_metrics):
            before = len(server.log)
            fit(train, storage_path=s3_path(server), name=train.__name__)
            num_requests.append(len(server.log) - before)
    with_ray, with_us = num_requests
    assert with_us <= with_ray + 2, "each worker looks once whether it sees the run's directory"


def test_a_missing_metric_is_the_worst_and_a_rank_alone_is_told(cluster: RayCluster, tmp_path: Path) -> None:
    from ray.train import CheckpointConfig

    ranked = CheckpointConfig(checkpoint_score_attribute="loss", checkpoint_score_order="min")
    run: Any = {"config": {"notes": str(tmp_path)}, "checkpoint_config": ranked}
    result = fit(telling.miss_a_metric, tmp_path / "runs", **run)
    assert notes(tmp_path, "kept") == [["0", "2"]] * 2, "the best and the latest"
    losses = [metrics["loss"] for _, metrics in result.best_checkpoints]
    assert losses == [sys.float_info.max, sys.float_info.max, 0.7, 0.7, 0.5, 0.4], "worst first"
    for step, line in zip((1, 4), sorted(notes(tmp_path, "warnings")), strict=True):
        told = f"0 the metric 'loss' is missing in the report of step {step}: it ranks as the worst"
        assert " ".join(line) == told
    (timeout,) = notes(tmp_path, "timeout")
    text = " ".join(timeout)
    assert text.startswith("Rank 1 gave no sign of life for 1 s in 'report'")
    assert "Every worker calls ckptstore.ray.report" in text
