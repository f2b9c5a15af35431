"""Lightning's Trainer through a store: killed and resumed with the same losses, on any strategy that runs on a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ckptstore.testing.ranks import run_ranks

ELASTIC = {"TORCHELASTIC_RUN_ID": "tests", "GROUP_RANK": "0", "NODE_RANK": "0"}


def call(name: str, *args: Any) -> Any:
    """A function of the worker; only the processes that it runs in load Lightning."""
    import lightning_worker

    return getattr(lightning_worker, name)(*args)


def check_resumed(whole: dict[str, Any], resumed: dict[str, Any], *, steps: tuple[int, ...]) -> None:
    """The run went on from one of the steps exactly as the uninterrupted one."""
    num_steps = max(whole["losses"]) + 1
    assert whole["resumed"] is None
    assert resumed["resumed"] in steps
    assert sorted(resumed["losses"]) == list(range(resumed["resumed"], num_steps))
    assert resumed["losses"] == {step: whole["losses"][step] for step in resumed["losses"]}
    assert resumed["num_batches"] == num_steps
    assert resumed["waited"] == whole["waited"]
    assert {*resumed["live"], resumed["resumed"]} == {*whole["live"], resumed["resumed"]}  # its source stays
    assert resumed["verified"]


def test_a_killed_job_goes_on_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    asked = {"strategy": "ddp", "max_epochs": 4, "every_n_train_steps": 3, "asynchronous": True}
    run_ranks(2, call, "whole_then_killed", str(tmp_path), asked, 14, env=ELASTIC, expect_killed=[0, 1])
    for whole, resumed in run_ranks(2, call, "resumed", str(tmp_path), asked, env=ELASTIC):
        check_resumed(whole, resumed, steps=(9, 12))  # the save of step 12 may have been in flight


CASES: dict[str, dict[str, Any]] = {
    "epochs": {"strategy": "ddp", "stateful_loader": False},
    "monitored": {
        "strategy": "ddp",
        "every_n_train_steps": 3,
        "monitor": "val_loss",
        "missing": "error",
        "trainer": {"val_check_interval": 2},
    },
    "fsdp1": {"strategy": "fsdp1", "every_n_train_steps": 4, "every_n_epochs": 1},
    "fsdp2": {"strategy": "fsdp2", "every_n_train_steps": 4, "every_n_epochs": 1, "asynchronous": True},
}
EXPECTED = {"epochs": (5,), "monitored": (9,), "fsdp1": (8,), "fsdp2": (5, 8)}


@pytest.mark.slow
def test_a_stopped_job_goes_on_under_every_strategy(tmp_path: Path) -> None:
    cases = {name: {**asked, "max_epochs": 3} for name, asked in CASES.items()}
    for found in run_ranks(2, call, "stopped_and_resumed", str(tmp_path), cases, 9, env=ELASTIC):
        for name, (whole, resumed) in found.items():
            check_resumed(whole, resumed, steps=EXPECTED[name])
            assert resumed["written_by"] == {0, 1}, f"{name}: the tensors are not written by all ranks"
    (losses,) = run_ranks(1, call, "plain_losses", str(tmp_path), list(CASES))
    for told, found_loss in losses:
        assert found_loss == pytest.approx(told, rel=1e-5)
