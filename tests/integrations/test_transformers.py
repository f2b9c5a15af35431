"""Hugging Face's Trainer through a store: killed and resumed with the same losses, each file stored once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ckptstore.testing.ranks import run_ranks


def call(name: str, *args: Any) -> Any:
    """A function of the worker; only the processes that it runs in load transformers."""
    import transformers_worker

    return getattr(transformers_worker, name)(*args)


def check_resumed(whole: dict[str, Any], resumed: dict[str, Any], *, steps: tuple[int, ...]) -> None:
    """The run went on from one of the steps exactly as the uninterrupted one."""
    assert whole["resumed"] is None
    assert resumed["resumed"] in steps
    assert sorted(resumed["losses"]) == list(range(resumed["resumed"] + 1, 13))
    assert resumed["losses"] == {step: whole["losses"][step] for step in resumed["losses"]}
    assert {**resumed["live"], **whole["live"]} == resumed["live"]
    assert resumed["live"].keys() <= {*whole["live"], resumed["resumed"]}  # what a job resumed from stays
    assert resumed["verified"]


def test_a_killed_job_goes_on_with_the_same_losses(tmp_path: Path) -> None:
    options = {"asynchronous": True}
    run_ranks(2, call, "whole_then_killed", str(tmp_path), options, 8, expect_killed=[0, 1])
    for whole, resumed in run_ranks(2, call, "resumed", str(tmp_path), options):
        check_resumed(whole, resumed, steps=(3, 6))  # the save of step 6 may have been in flight
        for files in whole["files"].values():
            assert {"model.safetensors", "optimizer.pt", "rng_state_0.pth", "rng_state_1.pth"} <= files.keys()
            assert set(files.values()) == {0, 1}  # both have stored a share
        assert whole["left"] == ["checkpoint-12"]  # Trainer rotates; no second names are left
        assert set(whole["metrics"]) >= {"loss", "grad_norm", "learning_rate", "epoch", "eval_loss"}
        assert "step" not in whole["metrics"]
