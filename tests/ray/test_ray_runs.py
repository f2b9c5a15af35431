"""Runs of Ray Train whose checkpoints Ray keeps and ckptstore stores: what Ray registers is whole, ranked as it should
be, and found again."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import reporting
from checking import check_losses, s3_path
from cluster import RayCluster, fit
from keeping import notes
from storing import arrow_s3

import ckptstore
from ckptstore.testing.s3_server import Fault, S3Server

STEPS = 4


def kept_by(result: Any) -> list[tuple[int, dict[str, Any]]]:
    """The steps of what Ray has kept, all of it verified, with Ray's metrics."""
    found = []
    for checkpoint, metrics in result.best_checkpoints:
        ours = ckptstore.ray.wrap(checkpoint)
        ours.verify().raise_if_damaged()
        found.append((ours.step, metrics))
    return found


@pytest.mark.slow
def test_an_upload_never_deletes_what_it_saved(cluster: RayCluster, tmp_path: Path) -> None:
    result = fit(reporting.upload_into_the_run, storage_path=tmp_path, name="run")
    (by_ray, _), (by_us, _) = result.best_checkpoints
    assert not Path(by_ray.path).exists(), "Ray alone has registered a checkpoint, and deleted it"
    assert by_us.path.startswith(f"{tmp_path}/run/written-1-"), "never the directory that was to be uploaded"
    ours = ckptstore.ray.wrap(by_us)
    assert [file.name for file in ours.files] == ["model-0.pt", "model-1.pt"]
    assert ours.verify().ok
    assert not (tmp_path / "run/written-1").exists(), "Ray has deleted that, as it was asked to"
    assert not (tmp_path / "run/group").exists(), "the ranks of an upload meet elsewhere"


@pytest.mark.slow
def test_scores_of_all_kinds(cluster: RayCluster, s3: S3Server, tmp_path: Path) -> None:
    from ray.train import CheckpointConfig

    ranked = CheckpointConfig(num_to_keep=2, checkpoint_score_attribute="loss", checkpoint_score_order="min")
    run: Any = (reporting.report_scores, s3_path(s3), "scores", {"notes": str(tmp_path)})
    result = fit(*run, num_workers=3, checkpoint_config=ranked)
    assert sorted(notes(tmp_path, "failed")) == [["0", "1"], ["1", "1"], ["2", "1"]], "the same on all ranks"
    assert [step for step, _ in kept_by(result)] == [4, 1], "worst first"
    assert ckptstore.ray.wrap(result.checkpoint).step == 4
    assert list(result.metrics_dataframe["step"]) == [4, 1]
    manifests = [key for key in s3.objects.buckets["test"] if "/scores/" in key and key.endswith("ckptstore.json")]
    assert len(manifests) == 2, "Ray has deleted the others"
    assert not [key for key in s3.objects.buckets["test"] if "/scores/group/" in key]


TROUBLE_SECONDS = 4.0
"""Longer than the three tries of pyarrow can last: they end after at most 3 s. Twenty seconds are only more of it."""


@contextmanager
def trouble_from_a_snapshot_on(s3: S3Server) -> Iterator[None]:
    """When Ray writes its first snapshot, the server answers every request by 503, for a while."""
    s3.log.clear()
    s3.faults.add(Fault(action="status", match=r"^(PUT|POST) .*checkpoint_manager_snapshot", times=None))
    over = threading.Event()

    def go_on() -> None:
        while not any(request.status == 503 for request in s3.log) and not over.wait(0.01):
            pass
        s3.faults.replace([Fault(action="status", times=None)])
        over.wait(TROUBLE_SECONDS)
        s3.faults.clear()

    with ThreadPoolExecutor(1) as pool:
        going = pool.submit(go_on)
        try:
            yield
        finally:
            over.set()
            going.result()


@pytest.mark.slow
def test_a_run_outlives_trouble_that_hits_rays_snapshot(cluster: RayCluster, s3: S3Server) -> None:
    """Whoever keeps the files."""
    filesystem = ckptstore.ray.s3_filesystem(arrow_s3(s3))
    with trouble_from_a_snapshot_on(s3):
        result = fit(reporting.report_in_every_way, "test/runs", "trouble", storage_filesystem=filesystem)
    refused = [request for request in s3.log if request.status == 503]
    assert sum("snapshot" in request.path for request in refused) > 3, "more than pyarrow would have tried"
    by_us, pointer, by_ray = [checkpoint for checkpoint, _ in result.best_checkpoints]
    for ours in (ckptstore.ray.wrap(by_us), ckptstore.ray.resolve(pointer)):
        assert ours.verify().ok
        assert [file.name for file in ours.files] == ["model-0.pt", "model-1.pt", "vocabulary"]
    with by_ray.as_directory() as directory:
        assert sorted(path.name for path in Path(directory).iterdir()) == ["model-0.pt", "model-1.pt", "vocabulary"]


RUNS = [
    ("fsdp", "state", "s3"),
    pytest.param("ddp", "async", "s3", marks=pytest.mark.long),
    pytest.param("ddp", "directory", "s3", marks=pytest.mark.long),
    pytest.param("fsdp", "sync", "local", marks=pytest.mark.long),
]
"""Every way to report, and both ways to train. Where files go is the storage's part, tested without Ray."""


@pytest.mark.parametrize(("parallel", "how", "where"), RUNS)
def test_a_killed_worker_costs_nothing(
    cluster: RayCluster, s3: S3Server, tmp_path: Path, parallel: str, how: str, where: str
) -> None:
    """The run goes on from what Ray hands back, with the losses of a run without any failure."""
    from ray.train import CheckpointConfig

    config = {"notes": str(tmp_path), "steps": STEPS, "parallel": parallel, "how": how, "kill_at": 2}
    run: Any = (reporting.train, s3_path(s3) if where == "s3" else tmp_path / "runs", f"{parallel}-{how}", config)
    result = fit(*run, torch=True, max_failures=1, checkpoint_config=CheckpointConfig(num_to_keep=2))
    assert (tmp_path / "killed").exists()
    check_losses(tmp_path, STEPS)
    first = {int(line[2]) for line in notes(tmp_path, "resumed")}
    assert first - {0} <= {1, 2}, "what Ray had registered when the worker was killed"
    kept = kept_by(result)
    assert [metrics["step"] for _, metrics in kept] == [STEPS - 2, STEPS - 1]
    assert ckptstore.ray.wrap(result.checkpoint) == ckptstore.ray.wrap(result.best_checkpoints[-1][0])


@pytest.mark.slow
def test_rank_0_alone_reads_what_another_run_has_kept(cluster: RayCluster, tmp_path: Path) -> None:
    config = {"notes": str(tmp_path)}
    fit(reporting.warm_start, storage_path=tmp_path / "runs", name="warm", config=config, torch=True)
    assert sorted(notes(tmp_path, "warm")) == [["0", "7.0"]] * 3 + [["1", "7.0"]] * 3


@pytest.mark.long
def test_a_state_is_loaded_by_more_workers(cluster: RayCluster, s3: S3Server, tmp_path: Path) -> None:
    config = {"notes": str(tmp_path), "parallel": "fsdp", "how": "state"}
    run = {"storage_path": s3_path(s3), "name": "grows", "torch": True}
    fit(reporting.train, config=config | {"steps": 2}, num_workers=2, **run)
    result = fit(reporting.train, config=config | {"steps": STEPS}, num_workers=4, **run)
    assert sorted(notes(tmp_path, "resumed"))[-1] == ["3", "4", "2"]
    check_losses(tmp_path, STEPS)
    assert ckptstore.ray.wrap(result.checkpoint).world_size == 4
