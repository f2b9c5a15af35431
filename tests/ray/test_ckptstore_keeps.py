"""Runs of Ray Train whose checkpoints ckptstore keeps: what is registered is committed, and a run goes on from it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import keeping
import pytest
from checking import check_losses, s3_path, worker_log
from cluster import RayCluster, fit
from keeping import notes

import ckptstore
from ckptstore import CheckpointGone, InvalidInput
from ckptstore.config import RetryConfig
from ckptstore.integrations.ray.context import require_worker
from ckptstore.integrations.ray.pointer import read_pointer
from ckptstore.testing.s3_server import Fault, S3Server

pytestmark = pytest.mark.slow

STEPS = 8


def test_directories_on_s3_are_downloaded_once_per_node(cluster: RayCluster, s3: S3Server, tmp_path: Path) -> None:
    from ray.train import CheckpointConfig

    ranked = CheckpointConfig(num_to_keep=2, checkpoint_score_attribute="loss", checkpoint_score_order="min")
    config = {"notes": str(tmp_path), "steps": 4}
    run: Any = (keeping.save_directories, s3_path(s3), "directories")
    result = fit(*run, config, num_workers=4, checkpoint_config=ranked)
    assert [line[1:] for line in notes(tmp_path, "read")] == [["4", "800000"]] * 4
    downloads = Counter(item.path for item in s3.log if item.method == "GET" and "model" in item.path)
    assert sorted(downloads.values()) == [2] * 4, "four workers on two nodes download each file twice"

    places = sorted(notes(tmp_path, "places"))
    assert [place[0] for place in places] == ["0/4", "1/4", "2/4", "3/4"]
    assert len({place[1] for place in places}) == 2
    assert {place[2] for place in places} == {"test/runs/directories/there"}

    log = worker_log(cluster, "directories")
    assert [text for text in log if " saved: " in text][-1].startswith("step 3 saved: "), "in the worker's own log"
    assert not [text for text in log if "Logging error" in text], "Ray's handler puts each record into JSON"

    assert result.metrics == {"loss": 1.5, "phase": "train", "ckptstore_step": 3}, "one column of ours is enough"
    assert ckptstore.ray.resolve(result.checkpoint).step == 3
    kept = {int(metrics["ckptstore_step"]): pointer for pointer, metrics in result.best_checkpoints}
    assert set(kept) == {1, 2}, "Ray keeps the two best pointers beside the latest"
    assert ckptstore.ray.resolve(kept[2]).metrics == {"loss": 0.5}
    with pytest.raises(CheckpointGone, match=r"step 1 was removed; live steps at .*: 2, 3"):
        ckptstore.ray.resolve(kept[1])  # the store keeps the latest two

    (tmp_path / "lost").mkdir()
    with ckptstore.open_store("s3://test/runs/directories/_ckptstore", storage_options=s3.storage_options) as store:
        store.save_directory(4, tmp_path / "lost", metrics={"loss": 2.5})  # committed, and unknown to Ray
    again = fit(*run, config | {"steps": 1})
    assert sorted(notes(tmp_path, "resumed")[4:]) == [["0", "5"], ["1", "5"]]
    reported = {metrics["ckptstore_step"]: (pointer, metrics["loss"]) for pointer, metrics in again.best_checkpoints}
    assert (list(reported)[-2:], reported[4][1]) == ([4, 5], 2.5), "what training went on from, and no other, again"
    assert ckptstore.ray.resolve(reported[4][0]).step == 4
    with ckptstore.ray.resolve(again).as_directory() as directory:
        assert (directory / "model-rank=00001.bin").read_bytes() == bytes([5, 1]) * 100_000


def test_a_leader_killed_during_an_upload_loses_nothing(cluster: RayCluster, tmp_path: Path) -> None:
    config = {"notes": str(tmp_path), "steps": STEPS, "parallel": "ddp", "how": "async", "strike": [0, 5, "kill"]}
    result = fit(keeping.train, storage_path=tmp_path / "runs", name="ddp", config=config, torch=True, max_failures=1)
    assert (tmp_path / "struck").exists()
    assert sorted(notes(tmp_path, "resumed")) == [["0", "2", "0"], ["0", "2", "4"], ["1", "2", "0"], ["1", "2", "4"]]
    check_losses(tmp_path, STEPS)
    assert result.metrics["ckptstore_step"] == STEPS - 1
    assert ckptstore.ray.resolve(result.checkpoint).step == STEPS - 1
    with ckptstore.open_store(tmp_path / "runs/ddp/_ckptstore") as store:
        assert [checkpoint.step for checkpoint in store] == [3, 5, 7]
        for checkpoint in store:
            assert checkpoint.verify().ok


@pytest.mark.long
def test_failed_and_skipped_saves_are_counted_and_what_is_registered_is_whole(
    cluster: RayCluster, s3: S3Server, tmp_path: Path
) -> None:
    from ray.train import CheckpointConfig
    from watching import Watcher

    config: dict[str, Any] = {"notes": str(tmp_path), "steps": 6, "parallel": "fsdp", "how": "async", "hurry": True}
    config["options"] = {"max_failures": 1}
    slow = "^PUT.*_ckptstore/checkpoints/step-0000000006.*/ckptstore.json"
    s3.faults.add(Fault(action="delay", match=slow, seconds=3.0))
    written = "^(PUT|POST).*_ckptstore/checkpoints/step-0000000003"
    s3.faults.add(Fault(action="status", match=written, status=403, code="AccessDenied", times=None))
    ranked = CheckpointConfig(checkpoint_score_attribute="step", checkpoint_score_order="max")
    watched: Any = {"callbacks": [Watcher(config)], "checkpoint_config": ranked}
    try:
        result = fit(keeping.train, s3_path(s3), "fsdp", config, torch=True, **watched)
    finally:
        s3.faults.clear()
    check_losses(tmp_path, 6)
    registered = ["1 good", "3 checkpoint-gone", "5 good", "6 good", "7 metrics", "8 good"]
    assert [" ".join(line) for line in notes(tmp_path, "registered")] == registered
    assert result.metrics["ckptstore_failed_saves"] == 1
    assert result.metrics["ckptstore_skipped_saves"] == 1
    assert result.metrics["ckptstore_waits"] >= 1
    by_step = {int(metrics["ckptstore_step"]): (pointer, metrics) for pointer, metrics in result.best_checkpoints}
    assert list(by_step) == [3, 1, 5, 6, 8], "what failed ranks last"
    assert "AccessDenied" in by_step[3][1]["ckptstore_error"]
    assert read_pointer(by_step[3][0], retry=RetryConfig()).number is None
    with pytest.raises(CheckpointGone, match=r"step 3 was never committed .* live steps at .*: 5, 6, 8"):
        ckptstore.ray.resolve(by_step[3][0])


def test_in_the_driver_there_is_no_worker(cluster: RayCluster) -> None:
    assert ckptstore.ray.current_worker() is None
    with pytest.raises(InvalidInput, match="report was called outside of a worker"):
        require_worker("report")


def in_local_mode(config: dict[str, Any]) -> None:
    import ray.train

    with pytest.raises(InvalidInput, match="needs a root"):
        ckptstore.ray.store()
    with ckptstore.ray.store(config["root"]) as store:
        assert ckptstore.ray.resume(store=store, prefer="ray") is None
        checkpoint = store.save_directory(0, config["root"].with_name("source"), metrics={"loss": 1.0})
        assert store.save_on_preemption(1, {}) is None
    ray.train.report({"saved": checkpoint.step})


def test_in_local_mode_a_store_works_and_reports_nothing(cluster: RayCluster, tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source/model.bin").write_bytes(b"weights")
    config = {"root": tmp_path / "store"}
    result = fit(in_local_mode, storage_path=tmp_path, name="local", config=config, num_workers=0, torch=True)
    assert result.metrics == {"saved": 0}
