"""The demo with Ray, as `make demo-ray` runs it but smaller: slow, because it trains."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from cluster import ENVIRONMENT

import ckptstore

pytestmark = pytest.mark.slow


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_demo_tells_its_story(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    picture, command = tmp_path / "demo.png", [sys.executable, "-m", "ckptstore.tools.cli", "demo", "--engine", "ray"]
    options = ["--store", tmp_path / "runs", "--picture", picture, "--width", "8", "--epochs", "4"]
    done = subprocess.run([*command, *map(str, options)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("resumed from step 2; ranks now: 2, at the save: 2") == 2
    accuracies = re.findall(r"step (\d): (\S+)% of 360 .* at the save it was (\S+)%", done.stdout)
    assert len(accuracies) == 2
    for name, (step, read, at_the_save) in zip(("ddp", "fsdp"), accuracies, strict=True):
        assert float(read) == pytest.approx(float(at_the_save), abs=1)
        with ckptstore.open_store(tmp_path / "runs" / name / "_ckptstore") as store:
            kept = {checkpoint.step: checkpoint.metrics["eval_loss"] for checkpoint in store}
            assert all(checkpoint.verify().ok for checkpoint in store)
        assert int(step) == min(kept, key=lambda key: kept[key])
        assert 4 in kept
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 20_000, "a picture of two runs, not an empty one"
