"""The tracker of MLflow, with its own client and a directory in the place of the server."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tracker_contract import HOSTILE_METRICS, Tracked, TrackerContract, follow, save

from ckptstore import CheckpointGone, InvalidInput, open_store
from ckptstore.integrations.mlflow import MlflowTracker, checkpoint_of, metric_name, references

pytestmark = pytest.mark.slow

if TYPE_CHECKING:  # two seconds, in each process that collects the tests
    from mlflow import MlflowClient


@pytest.fixture
def uri(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    return (tmp_path / "mlruns").as_uri()


@pytest.fixture
def client(uri: str) -> MlflowClient:
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=uri)


@pytest.fixture
def run_id(client: MlflowClient) -> str:
    return str(client.create_run(client.create_experiment("digits")).info.run_id)


class TestMlflow(TrackerContract):
    @pytest.fixture
    def tracked(self, uri: str, run_id: str) -> Tracked:
        return Tracked(
            MlflowTracker(run_id, tracking_uri=uri),
            partial(references, run_id, tracking_uri=uri),
            partial(checkpoint_of, run_id, tracking_uri=uri),
        )


def test_what_mlflow_shows(uri: str, client: MlflowClient, run_id: str, store_root: Path) -> None:
    with open_store(store_root) as store, follow(store, MlflowTracker(run_id, tracking_uri=uri)):
        save(store, 5, loss=0.5, other=math.nan)
        save(store, 6, loss=0.25)
        expected = store[5].uri
    run = client.get_run(run_id)
    experiment = run.info.experiment_id
    order = [{"field_name": "metrics.loss", "ascending": False}]
    first, second = client.search_logged_models([experiment], filter_string="metrics.loss < 1", order_by=order)
    told = (first.name, first.model_type, str(first.status), first.source_run_id)
    assert told == ("step-5", "checkpoint", "READY", run_id)
    assert (first.params["uri"], first.params["step"], second.name) == (expected, "5", "step-6")
    assert first.tags["mlflow.model.isExternal"] == "true"
    assert [(item.key, item.value, item.step) for item in first.metrics] == [("loss", 0.5, 5)]
    assert [(item.value, item.step) for item in client.get_metric_history(run_id, "loss")] == [(0.5, 5), (0.25, 6)]
    assert math.isnan(run.data.metrics["other"])
    outputs = {item.step: item.model_id for item in run.outputs.model_outputs}
    assert outputs == {5: first.model_id, 6: second.model_id}
    assert run.info.status == "RUNNING"


@pytest.mark.parametrize(
    "name", [*HOSTILE_METRICS, ".", "a/../b", "/", "...", "//x", "./a", "loss", "a/b", "x:y", "a\nb"]
)
def test_a_metric_gets_a_name_that_mlflow_takes(client: MlflowClient, run_id: str, name: str) -> None:
    usable = metric_name(name)
    client.log_metric(run_id, usable, 1.0)
    assert metric_name(usable) == usable


def test_a_changed_name_is_said_once(
    uri: str, client: MlflowClient, run_id: str, store_root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with open_store(store_root) as store, follow(store, MlflowTracker(run_id, tracking_uri=uri)):
        for step in (1, 2):
            save(store, step, **{"a%": 1.0, "a#": 2.0, "a_": 3.0, "b%": 4.0})
    warned = [record.getMessage() for record in caplog.records if "MLflow refuses" in record.getMessage()]
    assert [line.partition("'")[2].partition("'")[0] for line in warned] == ["a#", "a%", "b%"]
    assert "left out, for there is 'a_'" in warned[0]
    assert client.get_run(run_id).data.metrics == {"a_": 3.0, "b_": 4.0}


@pytest.fixture
def active_run(uri: str, run_id: str) -> Iterator[str]:
    import mlflow

    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(uri)
    with mlflow.start_run(run_id=run_id):
        yield run_id
    mlflow.set_tracking_uri(before)


def test_the_active_run_is_taken(active_run: str, store_root: Path) -> None:
    with open_store(store_root) as store, follow(store, MlflowTracker()):
        save(store, 1)
    assert [item.step for item in references(active_run)] == [1]
    import mlflow

    assert checkpoint_of(mlflow.active_run()).step == 1
    assert mlflow.active_run().info.run_id == active_run


def test_a_run_may_be_found_out_when_it_is_needed(uri: str, run_id: str, store_root: Path) -> None:
    tracker = MlflowTracker(lambda: run_id, tracking_uri=uri)
    with open_store(store_root) as store, follow(store, tracker):
        save(store, 1)
    assert str(tracker) == f"MLflow run {run_id}"
    assert [item.step for item in references(run_id, tracking_uri=uri)] == [1]


@pytest.mark.parametrize(
    ("run", "reason"), [(None, "no active run"), ("a" * 32, "MLflow refuses it"), (lambda: 5, "run is 5")]
)
def test_without_a_run_the_checkpoint_is_saved_and_the_log_says_so(
    uri: str, store_root: Path, run: object, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with open_store(store_root) as store:
        with follow(store, MlflowTracker(run, tracking_uri=uri)) as following:
            save(store, 1)
        assert store.latest().step == 1
    assert [item.step for item in following.unsent] == [1]
    assert reason in caplog.text


def test_a_run_that_is_none_is_refused(uri: str) -> None:
    with pytest.raises(InvalidInput, match="it is the id of an MLflow run"):
        MlflowTracker("it's", tracking_uri=uri)
    with pytest.raises(InvalidInput, match="it is the id of an MLflow run"):
        references("' OR 1 = 1", tracking_uri=uri)
    with pytest.raises(InvalidInput, match="MLflow refuses it"):
        checkpoint_of("a" * 32, tracking_uri=uri)


def test_models_of_somebody_else_are_passed_over(uri: str, client: MlflowClient, run_id: str, store_root: Path) -> None:
    with open_store(store_root) as store, follow(store, MlflowTracker(run_id, tracking_uri=uri)):
        save(store, 1)
    experiment = client.get_run(run_id).info.experiment_id
    client.create_logged_model(experiment, name="own", source_run_id=run_id, model_type="checkpoint")
    client.create_logged_model(experiment, name="other", source_run_id=run_id, model_type="agent")
    assert [item.step for item in references(run_id, tracking_uri=uri)] == [1]


def test_a_run_that_was_deleted(
    uri: str, client: MlflowClient, run_id: str, store_root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    client.delete_run(run_id)
    with open_store(store_root) as store, follow(store, MlflowTracker(run_id, tracking_uri=uri)) as following:
        save(store, 1, loss=0.5)
    assert [item.step for item in following.unsent] == [1]
    assert "the run was deleted" in caplog.text
    with pytest.raises(CheckpointGone, match="no reference"):
        checkpoint_of(run_id, tracking_uri=uri)
