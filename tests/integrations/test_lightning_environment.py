"""The callback that Lightning finds by itself: nothing without its variable, a clear error for a wrong one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest

from ckptstore import FastTier, KeepBest, KeepEvery
from ckptstore.errors import InvalidInput
from ckptstore.integrations.lightning.from_environment import callbacks
from ckptstore.integrations.tier_settings import FAST_SETTINGS, tier_of

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
GROUPS = ("lightning.pytorch.callbacks_factory", "pytorch_lightning.callbacks_factory")

FAST = "CKPTSTORE_LIGHTNING_FAST"

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
    environ |= {"CKPTSTORE_LIGHTNING_KEEP": "latest=1, every=2", "CKPTSTORE_LIGHTNING_FAST": str(tmp_path / "disk")}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM], env=environ, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "ckptstore.integrations.lightning.callback" in json.loads(done.stdout.splitlines()[-1])
    import ckptstore

    with ckptstore.open_store(tmp_path / "store") as store:
        assert [checkpoint.step for checkpoint in store] == [2]
    assert [path.name[:15] for path in (tmp_path / "disk").glob("*/checkpoints/*")] == ["step-0000000002"]


def test_nothing_happens_without_a_variable_and_wrong_ones_are_errors() -> None:
    assert callbacks({"PATH": "/bin", "CKPTSTORE_GRACE_SECONDS": "3"}) == []
    store = {"CKPTSTORE_LIGHTNING_STORE": "runs/x"}
    for environ, why in [
        ({"CKPTSTORE_LIGHTNING_KEEP": "latest=1"}, "CKPTSTORE_LIGHTNING_STORE is missing"),
        ({**store, "CKPTSTORE_LIGHTNING_EVERY": "3"}, "CKPTSTORE_LIGHTNING_EVERY is no variable"),
        ({**store, "CKPTSTORE_LIGHTNING_EVERY_N_TRAIN_STEPS": "0"}, "no number above 0"),
        ({**store, "CKPTSTORE_LIGHTNING_KEEP": "newest"}, "'newest' is no rule of what to keep"),
        ({**store, f"{FAST}_KEEP": "2"}, f"{FAST}_KEEP is there, and {FAST} is not"),
        ({**store, FAST: ""}, f"{FAST}='' cannot be read: it must be text"),
        ({**store, FAST: "disk", f"{FAST}_COPIES": "3"}, f"{FAST}_COPIES: copies is 3, it is 1 or 2"),
        ({**store, FAST: "disk", f"{FAST}_COPIES": "two"}, f"{FAST}_COPIES='two' cannot be read"),
        ({**store, FAST: "disk", f"{FAST}_KEEP": "0"}, "the newest fast checkpoint always stays"),
        ({**store, FAST: "disk", f"{FAST}_DRAIN": "seldom"}, f"{FAST}_DRAIN: 'seldom' is no rule of what to keep"),
        ({**store, FAST: "disk", f"{FAST}_DRAIN": "since=60"}, "compares no times"),
        ({**store, FAST: "disk", f"{FAST}_DRAIN": "every=2,"}, f"{FAST}_DRAIN: 'every=2,' is no rule"),
        ({**store, FAST: "disk", f"{FAST}_DRAIN_BYTES_PER_SECOND": "1GB"}, "SECOND='1GB' cannot be read"),
        ({**store, FAST: "disk", f"{FAST}_NODE": "a/b"}, "cannot be the name of a node"),
        ({**store, f"{FAST}_PATH": "disk"}, f"{FAST}_PATH is no variable"),
    ]:
        with pytest.raises(InvalidInput, match=why):
            callbacks(environ)


def test_settings_describe_a_tier_as_text_and_as_values() -> None:
    text = {"fast": "disk", "fast_copies": "2", "fast_keep": "3", "fast_drain": "every=1000, best=1:loss:min"}
    text |= {"fast_drain_bytes_per_second": "5e8", "fast_interface": "eth1", "fast_node": "a"}
    drain = KeepEvery(steps=1000) | KeepBest(1, "loss", "min")
    expected = FastTier("disk", 2, 3, drain, 5e8, "eth1", "a")
    assert tier_of(text) == expected
    values = {**text, "fast_copies": 2, "fast_keep": 3, "fast_drain": ["every=1000", "best=1:loss:min"]}
    assert tier_of({**values, "fast_drain_bytes_per_second": 500_000_000}) == expected
    assert set(FAST_SETTINGS) == {"fast", *(f"fast_{field.name}" for field in fields(FastTier) if field.name != "path")}
    assert tier_of(dict.fromkeys(FAST_SETTINGS)) is None
    for wrong in ({"fast": 1}, {"fast_keep": True}, {"fast_keep": 1.5}, {"fast_drain": [1]}, {"fast_interface": ""}):
        with pytest.raises(InvalidInput, match="cannot be read"):
            tier_of({"fast": "disk", **wrong})
