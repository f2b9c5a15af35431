"""The benchmark for GPUs works: here with a tiny model on the CPU, so that it is known to before GPUs are paid for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from cluster import ENVIRONMENT

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu" / "ray_train.py"


@pytest.mark.slow
def test_a_tiny_model_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    told = tmp_path / "told.json"
    options = ["--model", "tiny", "--no-gpu", "--workers", "2", "--length", "32", "--steps", "4"]
    command = [sys.executable, str(SCRIPT), *options, "--storage", str(tmp_path / "runs"), "--json", str(told)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    report = json.loads(told.read_text())
    assert report["losses_off_after_resume"] == 0.0, "the run went on with other losses"
    assert len(report["losses"]) == 4
    assert len(report["stall_seconds"]) == 3
    assert report["state_bytes_of_rank_0"] > 500_000
    assert all(report[name] > 0 for name in ("copy_to_host_seconds", "save_seconds", "load_seconds", "resume_seconds"))
