"""Lightning's Trainer through a store: killed and resumed with the same losses, on any strategy that runs on a CPU."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import forked_ranks
import pytest

from ckptstore import KeepLatest

pytestmark = pytest.mark.slow

run_ranks = partial(forked_ranks.run_ranks, modules=forked_ranks.LIGHTNING)
ELASTIC = {"TORCHELASTIC_RUN_ID": "tests", "GROUP_RANK": "0", "NODE_RANK": "0"}


def call(name: str, *args: Any) -> Any:
    """A function of the worker; only the processes that it runs in load Lightning."""
    import lightning_worker

    return getattr(lightning_worker, name)(*args)


def call_alone(name: str, *arguments: Any) -> Any:
    """A function of `lightning_alone`, in a process that has not loaded Lightning by its first name."""
    import lightning_alone

    return getattr(lightning_alone, name)(*arguments)


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


def test_a_killed_job_goes_on_in_the_middle_of_an_epoch_from_the_partner_of_a_lost_node(tmp_path: Path) -> None:
    """Nothing has come into the store when the job is killed."""
    asked = {"strategy": "ddp", "max_epochs": 4, "every_n_train_steps": 3, "asynchronous": True}
    slow = {"copies": 2, "drain_bytes_per_second": 1.0}
    run_ranks(2, call, "whole_then_killed", str(tmp_path), asked, 14, slow, env=ELASTIC, expect_killed=[0, 1])
    shutil.rmtree(tmp_path / "killed-node1")
    results = run_ranks(2, call, "resumed", str(tmp_path), asked, {"copies": 2}, env=ELASTIC)
    for rank, (whole, resumed) in enumerate(results):
        assert resumed["resumed"] in (9, 12)  # the save of step 12 may have been in flight
        assert not resumed["was_durable"]
        assert sorted(resumed["losses"]) == list(range(resumed["resumed"], 20))
        assert resumed["losses"] == {step: whole["losses"][step] for step in resumed["losses"]}
        assert (resumed["num_batches"], resumed["waited"]) == (20, whole["waited"])
        assert resumed["rank_given"] == rank  # what differs between ranks comes back to each
        last = max(whole["live"])
        assert resumed["live"][last] == whole["live"][last]  # the newest comes into the store at the end
        assert resumed["verified"]


def test_a_tier_ends_with_the_training(tmp_path: Path) -> None:
    """Of an error that comes out of `fit` nothing is left in the process; SIGTERM has the time that the store knows."""
    ((left, again),) = run_ranks(1, call, "interrupted", f"{tmp_path}/interrupted")
    assert left == []
    assert (again["resumed"], again["was_durable"]) == (6, False)
    assert max(again["live"]) == 15
    ((told, untold),) = run_ranks(1, call, "preempted", f"{tmp_path}/preempted")
    assert (told, untold) == ([2, 6], [2])


CASES: dict[str, dict[str, Any]] = {
    "epochs": {"strategy": "ddp", "stateful_loader": False},
    "monitored": {"strategy": "ddp", "every_n_train_steps": 3, "monitor": "val_loss", "missing": "error"},
    "fsdp1": {"strategy": "fsdp1", "every_n_train_steps": 4, "every_n_epochs": 1},
    "fsdp2": {"strategy": "fsdp2", "every_n_train_steps": 4, "every_n_epochs": 1, "asynchronous": True},
}
CASES["monitored"]["trainer"] = {"val_check_interval": 2}
CASES["fsdp2"]["retention"] = KeepLatest(3)
"""The best would depend on the source: before the first validation after it no save has that metric."""
EXPECTED = {"epochs": (5,), "monitored": (9,), "fsdp1": (8,), "fsdp2": (5, 8)}


def test_a_stopped_job_goes_on_under_every_strategy(tmp_path: Path) -> None:
    cases = {name: {**asked, "max_epochs": 3} for name, asked in CASES.items()}
    for found in run_ranks(2, call, "stopped_and_resumed", str(tmp_path), cases, 9, env=ELASTIC):
        for name, (whole, resumed) in found.items():
            check_resumed(whole, resumed, steps=EXPECTED[name])
            # what is below a megabyte and alike on all ranks, the lowest writes alone
            assert resumed["written_by"] == ({0} if CASES[name]["strategy"] == "ddp" else {0, 1}), name
    (losses,) = run_ranks(1, call, "plain_losses", str(tmp_path), list(CASES))
    for told, found_loss in losses:
        assert found_loss == pytest.approx(told, rel=1e-5)


@pytest.mark.slow
def test_other_numbers_of_ranks(tmp_path: Path) -> None:
    cases = {"case": {"strategy": "fsdp2", "every_n_train_steps": 4, "max_epochs": 3}}
    run_ranks(2, call, "stopped_and_resumed", str(tmp_path), cases, 9, env=ELASTIC)
    ((refused, found),) = run_ranks(1, call, "other_size", f"{tmp_path}/case")
    assert "hooks" in refused
    assert "per_rank" in refused
    assert found["resumed"] == 12
    assert sorted(found["losses"]) == list(range(12, 20))


def test_what_keeps_a_run_from_resuming(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    (found,) = run_ranks(1, call, "without_resume", f"{tmp_path}/store")
    assert found["off"]["resumed"] is None
    assert min(found["off"]["losses"]) == 0
    assert found["given"]["resumed"] is None
    assert min(found["given"]["losses"]) == 5  # from Lightning's own file of one epoch
    assert found["bias"] == pytest.approx(100, abs=1)  # a second fit goes on with the weights that are there
    assert found["files"] == [], "nor does a dry run leave any"


def test_what_cannot_be_saved_is_refused(tmp_path: Path) -> None:
    ((deepspeed, hook, uri, path, *keywords),) = run_ranks(1, call, "refusals", f"{tmp_path}/store")
    assert "DeepSpeedStrategy keeps model and optimizer in a form of its own" in deepspeed
    assert "DDPStrategy" in deepspeed
    assert "asked for 'state_dict'" in hook
    assert "s3" in uri
    assert "pointer/checkpoint.ckpt" in path
    assert path.strip().endswith("call fit without ckpt_path")
    expected = ("give retention=", "did you mean 'retention'", "resume=False", "60", "load_options are for a resume")
    logged = "monitor='valloss' was not logged; did you mean 'val_loss'? There are train_loss, val_loss"
    for text, wanted in zip(keywords, (*expected, logged), strict=True):
        assert wanted in text
    assert keywords[-1].endswith(" 5"), "the first epoch is the last"


def test_a_failed_asynchronous_save_is_raised_or_tolerated(tmp_path: Path) -> None:
    ((strict, tolerant),) = run_ranks(1, call, "failing", f"{tmp_path}/store")
    assert strict == ("StoreMissing at step 10", [5])
    assert tolerant == ("", [5, 15, 20])


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "num_ranks"), [("auto", 1), ("fsdp2", 2)])
def test_a_trainer_reads_the_best(tmp_path: Path, strategy: str, num_ranks: int) -> None:
    ranks = run_ranks(num_ranks, call, "validated_best", f"{tmp_path}/store", strategy, env=ELASTIC)
    for found, told, last, told_last in ranks:
        assert found == pytest.approx(told, rel=1e-5)
        assert last == pytest.approx(told_last, rel=1e-5)


@pytest.mark.slow
def test_what_model_checkpoint_saves_is_saved(tmp_path: Path) -> None:
    """Where only the default decides, the ends of epochs come to the validations."""
    (found,) = forked_ranks.run_ranks(1, call_alone, "beside_model_checkpoint", str(tmp_path))
    from lightning_alone import SCHEDULES

    for name, (theirs, ours) in found.items():
        assert theirs, name
        assert set(ours) >= set(theirs), name
        if SCHEDULES[name][1].keys() & {"every_n_train_steps", "every_n_epochs", "train_time_interval"}:
            assert set(ours) - set(theirs) <= ({7} if name == "the last" else set()), name


def test_an_epoch_that_has_ended_is_not_gone_on_with(tmp_path: Path) -> None:
    """With `max_steps` alone Lightning trains a batch once more when it resumes from there."""
    (found,) = forked_ranks.run_ranks(1, call_alone, "ends_of_epochs", str(tmp_path))
    assert [name for name, is_same in found if not is_same] == []
    assert len(found) == 18


def test_the_file_that_lightning_writes_is_stored_on_request(tmp_path: Path) -> None:
    ((whole, ended, best, names),) = forked_ranks.run_ranks(1, call_alone, "by_their_file", str(tmp_path))
    assert ended == whole
    assert best == whole, "the loss falls, so the last one is the best"
    assert names == ["checkpoint.ckpt"] * 4


def test_a_save_that_waits_for_no_validation_has_no_metric_of_older_weights(tmp_path: Path) -> None:
    (found,) = forked_ranks.run_ranks(1, call_alone, "last_beside_best", str(tmp_path))
    assert found == 2 * [(8, True), (10, False), (8, True)]


def test_a_file_of_an_earlier_requeue_is_passed_over(tmp_path: Path) -> None:
    env = dict.fromkeys(("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"), "0")
    env |= {"SLURM_NTASKS": "1", "SLURM_JOB_NAME": "train"}
    (found,) = forked_ranks.run_ranks(1, call_alone, "requeued_by_slurm", str(tmp_path), env=env)
    assert found == [None, 2, None, 4, 6, 2]


def test_a_trainer_goes_on_with_the_position_of_a_loader(tmp_path: Path) -> None:
    """In the middle and at the end of an epoch. Of 24 samples in batches of 3, two batches on each of two ranks leave 4
    to one, and two on one leave 3 to each of two: the epoch ends with that one, and with its validation."""
    ((positions, (fewer, more), interrupted, warnings),) = forked_ranks.run_ranks(
        1, call_alone, "loaders_of_a_trainer", str(tmp_path)
    )
    assert [different for *_, different in positions] == [[], [], []], positions
    assert fewer == [(2, 1.0), (3, 1.0), (4, 1.0), (5, 1.0), (6, 0.0), (6, -1.0)]
    assert more == [(2, 1.0), (3, 1.0), (4, 1.0), (5, 0.0), (5, -1.0)]
    assert interrupted == [(2, 12.0), (3, 0.0), (3, -1.0)], "the batch is left out, and the rest is as it would be"
    assert ["one batch of StreamLoader" in text for text in warnings] == [True, True, False]
    assert "does not step ReduceLROnPlateau" in warnings[2]


def test_the_last_checkpoint_of_a_store_is_that_of_every_call_of_a_trainer(tmp_path: Path) -> None:
    """Lightning itself looks for it at ModelCheckpoint alone, and goes on with untrained weights."""
    ((wrong, found),) = forked_ranks.run_ranks(1, call_alone, "last_of_a_store", str(tmp_path))
    assert wrong == []
    expected = {"fresh": [6, 6], "no resume": [6, 6], "empty": [None, 3], "as_file": [None, 3]}
    assert {name: found[name] for name in expected} == expected
    assert found["beside ModelCheckpoint"] == 6
    assert "the store has no checkpoint" in found["nothing"]
    assert "store.latest().load" in found["weights"]
    assert "roll_back" in found["best"]


def test_a_fit_goes_on_with_its_random_numbers(tmp_path: Path) -> None:
    assert forked_ranks.run_ranks(1, call_alone, "with_random_numbers", str(tmp_path)) == [[]]


def test_a_place_in_a_store_is_no_file_of_lightning(tmp_path: Path) -> None:
    (said,) = forked_ranks.run_ranks(1, call_alone, "places_in_a_store", str(tmp_path))
    for text in said:
        is_file, name, has_callback, *words = text.split()
        assert words[0].startswith("ckpt_path="), text
        if is_file == "True":
            assert text.endswith("/checkpoint.ckpt"), text
        else:
            assert ("Give the Trainer callbacks=[" in text) == (has_callback == "False"), text
            assert "ckpt_path='last'" in text
            assert ("roll_back" in text) == (name == "fit")
