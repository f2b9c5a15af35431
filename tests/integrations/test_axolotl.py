"""The plugin under Axolotl's own plugin manager, in the order of its `train`. Its other parts need GPUs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
AXOLOTL = ROOT / ".servers" / "axolotl"

pytestmark = pytest.mark.skipif(
    not AXOLOTL.exists() and not os.environ.get("CI"), reason="Axolotl is not there: run `make servers`"
)


def run(do: str, **asked: Any) -> subprocess.CompletedProcess[str]:
    """The worker, in a process that finds Axolotl."""
    path = os.pathsep.join([str(ROOT), str(AXOLOTL), str(Path(__file__).parent)])
    environ = {**os.environ, "PYTHONPATH": path, "AXOLOTL_DO_NOT_TRACK": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, "-W", "ignore", str(Path(__file__).parent / "axolotl_worker.py")]
    return subprocess.run(
        [*command, json.dumps({"do": do, **asked})], env=environ, capture_output=True, text=True, check=False
    )


def told(done: subprocess.CompletedProcess[str]) -> Any:
    """What the worker printed last."""
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.long
def test_a_killed_run_goes_on_from_the_disk_of_the_node(tmp_path: Path) -> None:
    cfg = {"output_dir": str(tmp_path / "out"), "ckptstore_store": str(tmp_path / "store")}
    cfg |= {"ckptstore_keep": ["latest=2"], "ckptstore_fast": str(tmp_path / "disk")}
    whole = told(run("train", given={**cfg, "ckptstore_store": str(tmp_path / "whole")}, kill_at=None, seed=0))
    assert not whole["resumed"]
    shutil.rmtree(tmp_path / "out")
    slow = {**cfg, "ckptstore_fast_drain_bytes_per_second": 1.0}
    assert run("train", given=slow, kill_at=8, seed=0).returncode == -9
    shutil.rmtree(tmp_path / "out")  # the next machine has never seen it
    (tmp_path / "out/checkpoint-7").mkdir(parents=True)  # nor is a half-written one taken
    assert not list((tmp_path / "store").glob("checkpoints/*/ckptstore.json")), "the store has none"
    again = told(run("train", given=cfg, kill_at=None, seed=7))
    assert again["resumed"]
    assert again["losses"] == whole["losses"]


@pytest.mark.long
def test_keys_that_mean_nothing_are_refused(tmp_path: Path) -> None:
    keys = {"base_model": "m", "datasets": [{"path": "d", "type": "alpaca"}], "learning_rate": 1e-4}
    keys |= {"micro_batch_size": 1, "gradient_accumulation_steps": 1, "output_dir": str(tmp_path / "out")}
    store = {"ckptstore_store": str(tmp_path / "store")}
    configs = [{}, {**store, "auto_resume_from_checkpoints": True}, {**store, "ckptstore_keep": ["newest=2"]}]
    configs += [{**store, "ckptstore_fast_copies": 2}, {**store, "ckptstore_fast": "d", "ckptstore_fast_drain": ["x"]}]
    mistyped, *refused = told(run("refused", keys={**keys, **store, "ckptstore_kep": ["latest=2"]}, configs=configs))
    assert "ckptstore_kep is no key of ckptstore; ckptstore_keep is" in mistyped
    for why, expected in zip(
        refused,
        [
            "The plugin has no store",
            "whole or not",
            "'newest=2' is no rule of what to keep",
            "ckptstore_fast_copies is there, and ckptstore_fast is not",
            "ckptstore_fast_drain: 'x' is no rule of what to keep",
        ],
        strict=True,
    ):
        assert expected in why
    assert not (tmp_path / "store").exists()
