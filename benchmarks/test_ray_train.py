"""A run of Ray Train whose two workers save ten times: Ray alone against Ray with ckptstore, and the way back."""

from __future__ import annotations

import json
import shutil
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install ckptstore[ray]")
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "ray"))

import ray_runs
from cluster import fit, ray_cluster
from s3_contest import Server, serving
from told import CLOCK, tell
from versus import FULL, ROUNDS

pytestmark = pytest.mark.benchmark(timer=CLOCK)

SIZE_BYTES = (1 << 30) if FULL else (4 << 20)
NUM_STEPS = 10 if FULL else 2
STEP_SECONDS = {"busy": 1.0, "calm": 3.0} if FULL else {"busy": 0.2}
"""Between two saves: longer than what Ray's controller waits between two looks at its workers (0.1 s here). While it is
busy an upload takes longer than that, so that either saves wait for each other or copies pile up."""
NUM_WORKERS = 2
PLACES = ["disk", "s3"] if FULL else ["s3"]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving() as running:
        yield running


@pytest.fixture(scope="module")
def sink() -> Iterator[Server]:
    """A server that keeps nothing large: fresh memory costs it more than the transfer, at the cost of who waits."""
    with serving(keeps_bodies=False) as running:
        yield running


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """Two nodes."""
    path = [str(Path(__file__).parent), *sys.path]
    with ray_cluster(environment={"PYTHONPATH": ":".join(path)}):
        yield


def storage_of(where: str, server: Server, tmp_path: Path) -> str:
    """A storage path as users of Ray write it."""
    if where == "disk":
        return str(tmp_path / "runs")
    return f"s3://bench/runs?region=us-east-1&endpoint_override={server.endpoint_url}"


def run(train: Any, way: str, storage_path: str, tmp_path: Path, pace: str = "busy") -> tuple[float, Any]:
    """One run of Ray Train, and its seconds from the call to the result."""
    from ray.train import CheckpointConfig

    config = {
        "way": way,
        "num_steps": NUM_STEPS,
        "num_workers": NUM_WORKERS,
        "size_bytes": SIZE_BYTES,
        "step_seconds": STEP_SECONDS[pace],
        "scratch": str(tmp_path),
        "told": str(tmp_path / "told"),
    }
    name = "ray" if way.startswith("Ray") else "ckptstore"
    started = time.perf_counter()
    keep = CheckpointConfig(num_to_keep=2)
    result = fit(train, storage_path=storage_path, name=name, config=config, num_workers=2, checkpoint_config=keep)
    return time.perf_counter() - started, result


def forget(where: str, server: Server, storage_path: str) -> None:
    if where == "disk":
        shutil.rmtree(storage_path, ignore_errors=True)
    else:
        from ckptstore.storage.open import open_storage

        storage = open_storage("s3://bench/runs", storage_options=server.storage_options)
        storage.delete([file.key for file in storage.list("")])
        storage.close()


@pytest.mark.parametrize("pace", list(STEP_SECONDS))
@pytest.mark.parametrize("where", PLACES)
def test_ten_saves(benchmark: Any, sink: Server, tmp_path: Path, where: str, pace: str) -> None:
    """What a save blocks the training; facts: the seconds of all ten with the steps, and of the run as a whole."""
    ways = ["ckptstore, save_async", "ckptstore, save", "Ray, SYNC", "Ray, ASYNC"]
    ways += ["ckptstore, durable, save_async"] if where == "disk" else []
    storage_path = storage_of(where, sink, tmp_path)
    blocked: dict[str, list[float]] = {way: [] for way in ways}
    loops: dict[str, list[float]] = {way: [] for way in ways}
    runs: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(ROUNDS):
        for way in ways:
            forget(where, sink, storage_path)
            seconds, _ = run(ray_runs.train, way, storage_path, tmp_path, pace)
            told = json.loads((tmp_path / "told").read_text())
            blocked[way].append(statistics.median(told["blocked"]))
            loops[way].append(round(told["all"], 2))
            runs[way].append(round(seconds, 2))
    forget(where, sink, storage_path)
    tell(benchmark, blocked, size_bytes=SIZE_BYTES, seconds_of_ten_saves=loops, seconds_of_the_run=runs)


@pytest.mark.parametrize("where", PLACES)
def test_restore(benchmark: Any, server: Server, tmp_path: Path, where: str) -> None:
    """Two workers on two nodes load their parts; facts: the bytes that the server sent for each node over its part."""
    storage_path = storage_of(where, server, tmp_path)
    samples: dict[str, list[float]] = {"ckptstore": [], "Ray": []}
    sent: dict[str, list[float]] = {"ckptstore": [], "Ray": []}
    forget(where, server, storage_path)
    for way in ("ckptstore, save", "Ray, SYNC"):
        run(ray_runs.train, way, storage_path, tmp_path)
    (tmp_path / "told").unlink()
    (tmp_path / "told").mkdir()
    for _ in range(ROUNDS):
        for way, found in samples.items():
            seen = len(server.ask("log")) if where == "s3" else 0
            run(ray_runs.restore, way, storage_path, tmp_path)
            found.append(max(float((tmp_path / "told" / str(rank)).read_text()) for rank in range(NUM_WORKERS)))
            if where == "s3":
                log = server.ask("log")[seen:]
                sent_bytes = sum(item["sent_bytes"] for item in log if item["operation"] == "GetObject")
                sent[way].append(round(sent_bytes / SIZE_BYTES, 3))
    forget(where, server, storage_path)
    tell(benchmark, samples, size_bytes=SIZE_BYTES, bytes_sent_over_the_states=sent if where == "s3" else "on a disk")
