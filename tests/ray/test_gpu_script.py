"""The benchmark for GPUs works: here with a tiny model on the CPU, so that it is known to before GPUs are paid for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from cluster import ENVIRONMENT

from ckptstore.tools.bench.figures.report import Report

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu" / "ray_train.py"


@pytest.mark.long
def test_a_tiny_model_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    told = tmp_path / "told.json"
    options = ["--model", "tiny", "--no-gpu", "--workers", "2", "--length", "32", "--steps", "4"]
    command = [sys.executable, str(SCRIPT), *options, "--storage", str(tmp_path / "runs"), "--json", str(told)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    stall, save, load = Report.from_json(json.loads(told.read_text())).workloads
    assert stall.facts["losses_off_after_resume"] == 0.0, "the run went on with other losses"
    assert len(stall.facts["losses"]) == 4
    assert stall.facts["resume_seconds"] > 0
    assert stall.size_bytes > 500_000
    assert [len(stall.figures(one)) for one in stall.outcomes] == [3, 3]
    assert all(min(workload.figures(one)) > 0 for workload in (stall, save, load) for one in workload.outcomes)
    assert "copy to host" in done.stdout
