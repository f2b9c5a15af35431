"""Hugging Face's Trainer through a store: killed and resumed with the same losses, each file stored once."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import forked_ranks
import pytest

from ckptstore.retention import KeepBest, KeepLatest

run_ranks = partial(forked_ranks.run_ranks, modules=forked_ranks.TRANSFORMERS)


def call(name: str, *args: Any) -> Any:
    """A function of the worker; only the processes that it runs in load transformers."""
    import transformers_worker

    return getattr(transformers_worker, name)(*args)


@pytest.mark.slow
def test_a_killed_job_goes_on_with_the_same_losses_from_the_partner_of_a_lost_node(tmp_path: Path) -> None:
    """Nothing has come into the store when the job is killed."""
    options, slow = {"asynchronous": True}, {"copies": 2, "drain_bytes_per_second": 1.0}
    run_ranks(2, call, "whole_then_killed", str(tmp_path), options, 8, slow, expect_killed=[0, 1])
    shutil.rmtree(tmp_path / "node1")
    for whole, resumed in run_ranks(2, call, "resumed", str(tmp_path), options, {"copies": 2}):
        assert resumed["resumed"] in (3, 6)  # the save of step 6 may have been in flight
        assert not resumed["was_durable"]
        assert resumed["losses"] == {step: whole["losses"][step] for step in resumed["losses"]}
        assert sorted(resumed["losses"]) == list(range(resumed["resumed"] + 1, 13))
        assert resumed["live"][12] == whole["live"][12]  # the newest comes into the store at the end
        assert resumed["files"][12].keys() == whole["files"][12].keys()
        assert resumed["verified"]
        for files in whole["files"].values():
            assert {"model.safetensors", "optimizer.pt", "rng_state_0.pth", "rng_state_1.pth"} <= files.keys()
            assert set(files.values()) == {0, 1}  # both have stored a share
        assert whole["left"] == ["checkpoint-12"]  # Trainer rotates; no second names are left
        assert set(whole["metrics"]) >= {"loss", "grad_norm", "learning_rate", "epoch", "eval_loss"}
        assert "step" not in whole["metrics"]


@pytest.mark.slow
def test_nodes_without_a_common_disk(tmp_path: Path) -> None:
    for found in run_ranks(2, call, "on_disks_of_their_own", str(tmp_path), {}):
        for files in found["files"].values():
            assert files["rng_state_0.pth"] == 0
            assert files["rng_state_1.pth"] == 1
            assert list(files).count("model.safetensors") == 1  # both nodes have it, one stores it
        assert found["verified"]
    (sums,) = run_ranks(1, call, "weights_of", f"{tmp_path}/store")
    assert len(sums) > 10


@pytest.mark.slow
def test_what_cannot_be_saved_or_resumed_is_refused(tmp_path: Path) -> None:
    ((missing, in_the_way, kind, failures),) = run_ranks(1, call, "damaged", str(tmp_path))
    assert "No rank has files in" in missing
    assert "step 3" in missing
    assert "cannot get a second name" in in_the_way
    assert "is not a Trainer's: it holds tensor state" in kind
    assert "max_failures=1 is for asynchronous saves" in failures


@pytest.mark.slow
def test_saves_of_a_user_beside_it_have_their_turn(tmp_path: Path) -> None:
    for steps, raised in run_ranks(2, call, "saves_beside", str(tmp_path)):
        assert steps == [3, 1003, 7]
        assert raised == ["StorageFull 6 1"], "by the next save, and never again"


@pytest.mark.slow
def test_the_best_model_of_the_end_comes_from_the_store_to_a_new_disk(tmp_path: Path) -> None:
    for rank, (left, is_best) in enumerate(
        run_ranks(2, call, "best_on_a_new_disk", str(tmp_path / "kept"), KeepBest(1, metric="eval_loss", mode="max"))
    ):
        assert is_best, rank
        assert "checkpoint-3" in left
    ((left, is_best),) = run_ranks(1, call, "best_on_a_new_disk", str(tmp_path / "gone"), KeepLatest(1))
    assert "checkpoint-3" not in left


@pytest.mark.slow
def test_an_evaluation_counts_for_its_own_step(tmp_path: Path) -> None:
    (found,) = run_ranks(1, call, "evaluated_seldom", str(tmp_path))
    assert {step: "eval_loss" in names for step, names in found.items()} == {3: False, 6: True, 9: False, 12: True}
    assert all("loss" in names for names in found.values())


@pytest.mark.slow
def test_a_run_that_does_not_resume_is_warned_of(tmp_path: Path) -> None:
    ((told, (newer, warning)),) = run_ranks(1, call, "forgotten", str(tmp_path))
    assert "store has step 6: trainer.train(resume_from_checkpoint=callback.resume())" in newer
    assert told == [(3, 6)]
    assert "begins anew" in warning
    assert "step 6" in warning


@pytest.mark.slow
def test_what_trainer_writes_on_sigterm_comes_to_the_store(tmp_path: Path) -> None:
    assert run_ranks(1, call, "preempted", str(tmp_path)) == [[4, 5]]


@pytest.mark.slow
def test_nothing_of_a_save_in_flight_is_pushed_to_the_hub(tmp_path: Path) -> None:
    assert run_ranks(1, call, "pushed", str(tmp_path)) == [["none"]]


@pytest.mark.slow
def test_the_best_of_a_run_that_goes_on_is_whole_and_its_own_or_forgotten(tmp_path: Path) -> None:
    (found,) = run_ranks(1, call, "best_of_a_resumed_run", str(tmp_path))
    assert found == {"fast": (3, True), "torn": (3, True), "gone": (None, False)}
