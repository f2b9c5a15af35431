"""Reports of metrics in real runs: what they cost, and what becomes of those that are missing."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
import telling
from checking import s3_path
from cluster import RayCluster, fit
from keeping import notes

from ckptstore import RankTimeout
from ckptstore.group.life import LEFT
from ckptstore.integrations.ray.ray_board import RayBoard
from ckptstore.testing.s3_server import s3_server


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

    result = fit(
        telling.miss_a_metric,
        storage_path=tmp_path / "runs",
        name="missing",
        config={"notes": str(tmp_path)},
        checkpoint_config=CheckpointConfig(checkpoint_score_attribute="loss", checkpoint_score_order="min"),
    )
    assert notes(tmp_path, "kept") == [["0", "2"]] * 2, "the best and the latest"
    losses = [metrics["loss"] for _, metrics in result.best_checkpoints]
    assert losses == [sys.float_info.max, sys.float_info.max, 0.7, 0.7, 0.5, 0.4], "worst first"
    told = sorted(" ".join(line) for line in notes(tmp_path, "warnings"))
    assert told == [
        f"0 the metric 'loss' is missing in the report of step {step}: it ranks as the worst" for step in (1, 4)
    ]
    (timeout,) = notes(tmp_path, "timeout")
    text = " ".join(timeout)
    assert text.startswith("Rank 1 gave no sign of life for 1 s in 'report'")
    assert "Every worker calls ckptstore.ray.report" in text


def test_a_board_in_an_actor_is_one_for_all_and_its_end_is_an_error(cluster: RayCluster) -> None:
    import ray

    mine, theirs, other = (RayBoard("start", prefix=name, world_size=2, timeout_seconds=60) for name in "aab")
    assert mine.post("1.00001", b"first") is None
    assert mine.post("1.00001", b"first") is None, "a lost reply"
    assert theirs.post("1.00001", b"second") == b"first"
    assert theirs.fetch(["1.00001", "1.00002"]) == {"1.00001": b"first"}
    assert other.fetch(["1.00001"]) == {}
    mine.give_sign("life.00001")
    before = theirs.signs(["life.00000", "life.00001"])
    mine.give_sign("life.00001")
    assert theirs.signs(["life.00001"]) != before
    mine.give_sign("life.00001", last=True)
    assert theirs.signs(["life.00000", "life.00001"]) == {"life.00001": LEFT}
    mine.remove(["1.00001", "1.00003"])
    assert mine.fetch(["1.00001"]) == {}
    ray.kill(mine._actor)

    def ask_until_it_has_ended() -> None:
        while theirs.fetch(["1.00001"]) == {}:
            time.sleep(0.01)

    with pytest.raises(RankTimeout, match="the messages of the workers is not reached") as caught:
        ask_until_it_has_ended()
    assert caught.value.committed is None
