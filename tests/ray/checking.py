"""What tests of runs in which ckptstore keeps the files ask of them afterwards."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cluster import RayCluster
from keeping import losses_alone, notes

from ckptstore.testing.s3_server import S3Server


def s3_path(server: S3Server) -> str:
    """A storage path as users of Ray write it."""
    return f"s3://test/runs?region=us-east-1&endpoint_override={server.endpoint_url}"


def check_losses(directory: Path, steps: int) -> None:
    """Every step was trained, and whatever was trained twice gave the same loss, that of a run without any failure."""
    expected = losses_alone(steps)
    told = [(int(step), float(loss)) for step, loss in notes(directory, "losses")]
    assert {step for step, _ in told} == set(range(steps))
    for step, loss in told:
        assert loss == pytest.approx(expected[step], rel=1e-9), f"step {step}"


def worker_log(cluster: RayCluster, run: str) -> list[str]:
    """The lines of all workers of a run, as Ray's handler of logs has written them; what they print is among them."""
    files = Path(cluster.temp_dir, "ray/session_latest/logs/train").glob("ray-train-app-worker-*")
    lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return [line["message"] for line in lines if line["run_name"] == run]
