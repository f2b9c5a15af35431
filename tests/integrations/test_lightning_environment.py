"""The callback that Lightning finds by itself: nothing without its variable, a clear error for a wrong one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from ckptstore.errors import InvalidInput
from ckptstore.integrations.lightning.from_environment import callbacks

ROOT = Path(__file__).parents[2]
GROUPS = ("lightning.pytorch.callbacks_factory", "pytorch_lightning.callbacks_factory")

PROGRAM = """
import json, sys
import lightning.pytorch as pl
from lightning.pytorch.demos.boring_classes import BoringModel
import torch

trainer = pl.Trainer(max_steps=3, accelerator="cpu", logger=False, enable_progress_bar=False,
                     enable_model_summary=False, enable_checkpointing=False)
trainer.fit(BoringModel())
print(json.dumps([type(callback).__module__ for callback in trainer.callbacks]))
"""


def test_lightning_finds_it_by_the_entry_points_of_the_package(tmp_path: Path) -> None:
    entry_points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    assert set(entry_points) == set(GROUPS)
    # The metadata as an install writes them, found before those of whatever is installed here.
    info = tmp_path / "ckptstore-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ckptstore\nVersion: 0\n")
    lines = [line for group, names in entry_points.items() for line in (f"[{group}]", *map(" = ".join, names.items()))]
    (info / "entry_points.txt").write_text("\n".join(lines))
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    environ |= {"CKPTSTORE_LIGHTNING_STORE": str(tmp_path / "store"), "CKPTSTORE_LIGHTNING_EVERY_N_TRAIN_STEPS": "2"}
    environ |= {"CKPTSTORE_LIGHTNING_KEEP": "latest=1, every=2"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM], env=environ, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "ckptstore.integrations.lightning.callback" in json.loads(done.stdout.splitlines()[-1])
    import ckptstore

    with ckptstore.open_store(tmp_path / "store") as store:
        assert [checkpoint.step for checkpoint in store] == [2]


def test_nothing_happens_without_a_variable_and_wrong_ones_are_errors() -> None:
    assert callbacks({"PATH": "/bin", "CKPTSTORE_GRACE_SECONDS": "3"}) == []
    store = {"CKPTSTORE_LIGHTNING_STORE": "runs/x"}
    for environ, why in [
        ({"CKPTSTORE_LIGHTNING_KEEP": "latest=1"}, "CKPTSTORE_LIGHTNING_STORE is missing"),
        ({**store, "CKPTSTORE_LIGHTNING_EVERY": "3"}, "CKPTSTORE_LIGHTNING_EVERY is no variable"),
        ({**store, "CKPTSTORE_LIGHTNING_EVERY_N_TRAIN_STEPS": "0"}, "no number above 0"),
        ({**store, "CKPTSTORE_LIGHTNING_KEEP": "newest"}, "'newest' does not say what to keep"),
    ]:
        with pytest.raises(InvalidInput, match=why):
            callbacks(environ)
