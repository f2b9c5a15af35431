"""torchtitan's Trainer with the debug model: our manager against its own DCP manager, on two processes or one.

The losses say what was restored: each step's depends on the weights, the moments of AdamW, the learning rate and the
position in the data.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import forked_ranks
import pytest

from ckptstore import open_store

PACKAGES = Path(__file__).parents[2] / ".servers/torchtitan"
"""torchtitan and what it needs besides the packages of the environment; see tests/servers/install.py."""

LAYOUTS = [(2, {"data_parallel_shard": 2}), (2, {"tensor_parallel": 2}), (2, {"data_parallel_replicate": 2}), (1, {})]
SHARDED = {"data_parallel_shard": 2}


@pytest.fixture(autouse=True)
def _torchtitan(monkeypatch: pytest.MonkeyPatch) -> None:
    if not (PACKAGES / ".installed").exists():
        message = "torchtitan is not installed; run `make servers`"
        pytest.fail(message) if os.environ.get("CI") else pytest.skip(message)
    monkeypatch.setattr(sys, "path", [*sys.path, str(PACKAGES)])  # behind what the environment has itself


run_ranks = partial(forked_ranks.run_ranks, modules=(*forked_ranks.TORCH, "torchtitan_on_cpu"), timeout_seconds=100)


def call(name: str, *args: Any) -> Any:
    """A function of the worker; only the processes that it runs in load torchtitan."""
    import torchtitan_worker

    return getattr(torchtitan_worker, name)(*args)


def train(n: int, folder: Path, checkpoint: dict[str, Any] | None = None, **how: Any) -> dict[str, Any]:
    """One training of `n` processes. All of them see the same."""
    killed = {"expect_killed": list(range(n))} if how.get("kill_at") else {}
    found: list[Any] = run_ranks(n, call, "train", str(folder), checkpoint or {}, how, **killed)
    assert all(each == found[0] for each in found)
    return found[0] or {}


def losses(n: int, folder: Path, checkpoint: dict[str, Any] | None = None, **how: Any) -> dict[int, float]:
    found = train(n, folder, checkpoint, **how)
    assert "error" not in found, found["error"]
    return dict(found["losses"])


def test_it_goes_on_where_it_ended_as_with_their_own_manager(tmp_path: Path) -> None:
    whole = losses(2, tmp_path / "whole", manager="theirs", steps=6, **SHARDED)
    train(2, tmp_path, {"keep_latest_k": 1}, steps=6, kill_at=5, **SHARDED)
    store = open_store(tmp_path / "checkpoint", group="solo")
    assert [checkpoint.step for checkpoint in store] == [4], "the one before has gone to the trash"
    assert losses(1, tmp_path, steps=6) == pytest.approx({5: whole[5], 6: whole[6]}, rel=1e-6)
    assert [checkpoint.step for checkpoint in store] == [4, 6], "what a job went on from stays"
    assert all(checkpoint.verify().ok for checkpoint in store)


def test_what_the_options_cannot_mean_is_refused(tmp_path: Path) -> None:
    (told,) = run_ranks(1, call, "refused", str(tmp_path))
    assert told == {
        "mode": "ValueError: Invalid async_mode: sometimes",
        "inside": f"ValueError: hf_folder {tmp_path}/a/hf is inside of the store at {tmp_path}/a, where only its own "
        "files may lie.",
        "hf_folder": "ValueError: hf_folder is where last_save_in_hf puts its files, and that is False.",
        "keep": "ValueError: keep_latest_k cannot be negative.",
        "relative": "ValueError: initial_load_path must be an absolute path or a remote URI (e.g. gs://...): a/b",
        "excluded": "InvalidInput: exclude_from_loading names momentum, which is no part of this training",
        "adapter": "InvalidInput: last_save_in_hf and initial_load_in_hf need the model's sd_adapter, and this model "
        "has none",
        "off": "False False False",
    }
