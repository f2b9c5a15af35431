"""What goes wrong around a run of Ray Train whose checkpoints ckptstore keeps: nodes go, a driver is killed. And every
pair of the ways to train, to save, to store and to change the number of workers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keeping
import pytest
from checking import check_losses, s3_path
from cluster import RayCluster, fit, ray_cluster
from keeping import notes

import ckptstore
from ckptstore.testing.s3_server import S3Server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 8
WATCHED = {"RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "1", "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S": "0.2"}


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    """Two nodes of which Ray watches whether they are about to go."""
    with ray_cluster(environment=WATCHED) as running:
        yield running


@pytest.fixture(autouse=True)
def released(cluster: RayCluster) -> Iterator[None]:
    """Each test begins with all resources."""
    yield
    cluster.release()


def when(is_so: Callable[[], bool], act: Callable[[], object]) -> threading.Thread:
    """Act from another thread once something is so; give up after two minutes."""

    def watch() -> None:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            if is_so():
                act()
                return
            time.sleep(0.05)

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


@pytest.mark.parametrize(
    ("parallel", "how", "where", "before", "after"),
    [("fsdp", "sync", "s3", 2, 1), pytest.param("ddp", "async", "local", 1, 2, marks=pytest.mark.long)],
)
def test_every_way_to_save_survives_a_kill_and_another_number_of_workers(
    cluster: RayCluster, s3: S3Server, tmp_path: Path, parallel: str, how: str, where: str, before: int, after: int
) -> None:
    """One worker is killed; later the run goes on with fewer or more, from what Ray hands back."""
    config = {"notes": str(tmp_path), "steps": 6, "parallel": parallel, "how": how, "strike": [0, 3, "kill"]}
    path = tmp_path / "runs" if where == "local" else s3_path(s3)
    run: dict[str, Any] = {"storage_path": path, "name": f"{parallel}-{how}", "torch": True, "max_failures": 1}
    fit(keeping.train, config=config, num_workers=before, **run)
    assert (tmp_path / "struck").exists()
    result = fit(keeping.train, config=config | {"steps": STEPS, "prefer": "ray"}, num_workers=after, **run)
    resumed = {tuple(map(int, line[1:])) for line in notes(tmp_path, "resumed")}
    assert resumed == {(before, 0), (before, 2), (after, 6)}
    check_losses(tmp_path, STEPS)
    checkpoint = ckptstore.ray.resolve(result.checkpoint)
    assert (checkpoint.step, checkpoint.world_size) == (STEPS - 1, after)
    assert checkpoint.verify().ok


DRIVER = """
import json, sys
import ray
import keeping
from cluster import fit
address, path, config = json.loads(sys.argv[1])
ray.init(address=address, logging_level="ERROR", log_to_driver=False)
fit(keeping.train, storage_path=path, name="driven", config=config, torch=True)
"""


@pytest.mark.long
def test_a_driver_that_is_killed_is_started_again(cluster: RayCluster, tmp_path: Path) -> None:
    """Ray ends the controller and the workers with it; the same run is begun again under its name."""
    config = {"notes": str(tmp_path), "steps": 40, "parallel": "fsdp", "how": "async", "pause_seconds": 0.5}
    given = json.dumps([cluster.address, str(tmp_path / "runs"), config])
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, given], stderr=subprocess.DEVNULL)
    try:
        watcher = when(lambda: len(notes(tmp_path, "losses")) >= 6, lambda: os.kill(driver.pid, signal.SIGKILL))
        assert driver.wait(200) == -signal.SIGKILL
        watcher.join()
    finally:
        driver.kill()
        driver.wait()
    steps = len(notes(tmp_path, "losses")) + 4
    result = fit(keeping.train, tmp_path / "runs", "driven", config | {"steps": steps, "pause_seconds": 0}, torch=True)
    assert int(notes(tmp_path, "resumed")[-1][2]) >= 4
    check_losses(tmp_path, steps)
    assert ckptstore.ray.resolve(result.checkpoint).verify().ok


def drain(cluster: RayCluster, node: Any, *, seconds: float) -> None:
    """Tell Ray that a node is taken away in so many seconds, as a cloud's notice would."""
    from ray._raylet import GcsClient
    from ray.core.generated import autoscaler_pb2

    reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    deadline_ms = int((time.time() + seconds) * 1000)
    accepted, message = GcsClient(address=cluster.address).drain_node(node.node_id, reason, "a test", deadline_ms)
    assert accepted, message


@pytest.mark.long
@pytest.mark.parametrize(("needed_seconds", "saved"), [(0.0, True), (10_000.0, False)])
def test_a_notice_of_preemption_leads_to_a_save_if_there_is_time(
    cluster: RayCluster, tmp_path: Path, needed_seconds: float, saved: bool
) -> None:
    from watching import Watcher

    config = {"notes": str(tmp_path), "steps": 40, "parallel": "ddp", "how": "none"}
    config |= {"pause_seconds": 0.25, "needed_seconds": needed_seconds}
    node = cluster.add_node(num_cpus=4) if len(cluster.nodes) < 2 else cluster.nodes[1]
    drained = when(lambda: len(notes(tmp_path, "losses")) >= 4, lambda: drain(cluster, node, seconds=600))
    result = fit(keeping.train, tmp_path / "runs", "notice", config, torch=True, callbacks=[Watcher(config)])
    drained.join()
    cluster.remove_node(node)
    told = notes(tmp_path, "preempted")
    assert told, "the workers have seen the notice"
    assert len({tuple(line[1:]) for line in told}) == 1, "one notice, one save"
    step, made = int(told[0][0]), int(told[0][1])
    assert told[0][2:4] == ["1", "1"]
    if saved:
        assert made == step
        assert ckptstore.ray.resolve(result.checkpoint).step == step
    else:
        assert made == -1
        assert "a save needs 10000.0 s" in " ".join(told[0])
        assert result.checkpoint is None
        assert notes(tmp_path, "registered") == [[str(step), "metrics"]]


def test_a_node_removed_during_an_upload_leaves_fewer_workers_and_no_half_checkpoint(
    cluster: RayCluster, s3: S3Server, tmp_path: Path
) -> None:
    """The leader hangs in the middle of its upload, a node goes, and Ray starts again with what is left."""
    node = cluster.add_node() if len(cluster.nodes) < 2 else cluster.nodes[1]
    config = {"notes": str(tmp_path), "steps": STEPS, "parallel": "fsdp", "how": "async", "strike": [0, 3, "hang"]}
    removed = when((tmp_path / "struck").exists, lambda: cluster.remove_node(node))
    how: Any = {"num_workers": (1, 2), "torch": True, "max_failures": 2}
    result = fit(keeping.train, s3_path(s3), "removed", config, **how)
    removed.join()
    resumed = [tuple(line[1:]) for line in notes(tmp_path, "resumed")]
    assert resumed[0] == ("2", "0")
    assert resumed[-1][1] == "2", "step 3 was never committed"
    check_losses(tmp_path, STEPS)
    checkpoint = ckptstore.ray.resolve(result.checkpoint)
    assert checkpoint.step == STEPS - 1
    assert checkpoint.verify().ok
