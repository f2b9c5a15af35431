"""Functions of Ray Tune report to it whole checkpoints, and go on from them: their own, and those of other trials."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import tune_trials as trials
from checking import s3_path
from cluster import RayCluster
from keeping import notes

import ckptstore
from ckptstore.testing.s3_server import S3Server

pytestmark = pytest.mark.slow


def tuned(
    space: dict[str, Any], scheduler: Any, storage_path: str, num_to_keep: int, together: int, max_failures: int = 0
) -> Any:
    from ray import tune

    return tune.Tuner(
        trials.climb,
        param_space=space,
        tune_config=tune.TuneConfig(scheduler=scheduler, metric="value", mode="max", max_concurrent_trials=together),
        run_config=tune.RunConfig(
            storage_path=storage_path,
            name="run",
            checkpoint_config=tune.CheckpointConfig(num_to_keep=num_to_keep),
            failure_config=tune.FailureConfig(max_failures=max_failures),
            verbose=0,
        ),
    ).fit()


def test_a_clone_goes_on_from_the_checkpoint_of_another_trial(cluster: RayCluster, tmp_path: Path) -> None:
    from ray import tune
    from ray.tune.schedulers import PopulationBasedTraining

    scheduler = PopulationBasedTraining(
        time_attr="training_iteration",
        perturbation_interval=2,
        quantile_fraction=0.5,
        resample_probability=0.0,
        hyperparam_mutations={"lr": [1.0, 10.0]},
        synch=True,
    )
    space = {"lr": tune.grid_search([1.0, 10.0]), "how": "directory", "notes": str(tmp_path)}
    results = tuned(space, scheduler, str(tmp_path / "runs"), num_to_keep=3, together=2)
    assert not results.errors
    (worse,) = [trial for trial, rate in notes(tmp_path, "started") if rate == "1.0"]
    step, value = next(line[1:] for line in notes(tmp_path, "resumed") if line[0] == worse)
    assert float(value) == 10.0 * int(step), "where only the other trial had been"
    for result in results:
        assert ckptstore.ray.wrap(result.checkpoint).verify().ok
        assert len(result.best_checkpoints) == 3, "Tune deletes"
    refused = notes(tmp_path, "refused")
    counts = Counter(line[0] for line in refused)  # the trials write side by side
    num_starts = counts["resume"]
    assert num_starts >= 2
    assert counts == {"store": 2 * num_starts, **dict.fromkeys(("resume", "upload_fn", "report"), num_starts)}
    assert "in a function of Ray Tune it does not work" in " ".join(refused[0])
    assert not Path("/tmp/never").exists()


@pytest.mark.long
def test_trials_are_stopped_early_and_failures_cost_nothing(cluster: RayCluster, s3: S3Server, tmp_path: Path) -> None:
    from ray import tune
    from ray.tune.schedulers import ASHAScheduler

    rates = [2.0, 1.0]
    space = {"lr": tune.grid_search(rates), "how": "state", "notes": str(tmp_path), "fail_at": 2}
    scheduler = ASHAScheduler(max_t=trials.STEPS, grace_period=3, reduction_factor=2)
    results = tuned(space, scheduler, s3_path(s3), num_to_keep=1, together=1, max_failures=1)
    assert not results.errors
    best = results.get_best_result()
    assert best.metrics["value"] == 2.0 * trials.STEPS
    state = {"step": 0, "value": 0.0}
    ckptstore.ray.wrap(best.checkpoint).load(state)
    assert state == {"step": trials.STEPS, "value": 2.0 * trials.STEPS}
    assert {line[1] for line in notes(tmp_path, "resumed")} == {"2"}
    last = {result.config["lr"]: ckptstore.ray.wrap(result.checkpoint).step for result in results}
    assert last == {2.0: trials.STEPS, 1.0: 3}, "the worse one, which comes second, is stopped at the rung"
    manifests = [key for key in s3.objects.buckets["test"] if key.endswith("ckptstore.json")]
    assert len(manifests) == len(rates)
