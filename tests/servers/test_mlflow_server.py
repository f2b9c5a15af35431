"""The tracker of MLflow with a real server: a SQL database behind it, requests that fail, a server that goes away."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hostile_front import Wire, hostile_front
from tracker_contract import Tracked, TrackerContract, follow, save

from ckptstore import open_store
from ckptstore.integrations import mlflow as mlflow_tracker
from ckptstore.integrations.mlflow import MlflowTracker, checkpoint_of, references

if TYPE_CHECKING:  # two seconds, in each process that collects the tests
    from mlflow import MlflowClient

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]  # a busy machine takes minutes to start the server
Serve = Callable[..., AbstractContextManager[str]]


@pytest.fixture(scope="module")
def server(serve_mlflow: Serve, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serve_mlflow(tmp_path_factory.mktemp("mlflow")) as url:
        yield url


def new_run(uri: str) -> str:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    return str(client.create_run(client.create_experiment(f"digits {time.time_ns()}")).info.run_id)


class TestMlflowServer(TrackerContract):
    @pytest.fixture
    def tracked(self, server: str) -> Tracked:
        run_id = new_run(server)
        return Tracked(
            MlflowTracker(run_id, tracking_uri=server),
            partial(references, run_id, tracking_uri=server),
            partial(checkpoint_of, run_id, tracking_uri=server),
        )


def test_the_best_is_found_by_mlflow_too(server: str, store_root: Path) -> None:
    """A loss that is not a number must not be the best: the server would keep it as 0 on a model."""
    from mlflow import MlflowClient

    run_id, client = new_run(server), MlflowClient(tracking_uri=server)
    with open_store(store_root) as store, follow(store, MlflowTracker(run_id, tracking_uri=server)):
        for step, loss in ((1, 0.5), (2, float("nan")), (3, 0.25), (4, float("-inf"))):
            save(store, step, loss=loss)
    run = client.get_run(run_id)
    order = [{"field_name": "metrics.loss", "ascending": True}]
    found = client.search_logged_models([run.info.experiment_id], "metrics.loss < 10", order_by=order)
    assert [model.name for model in found] == ["step-3", "step-1"]
    assert sorted(item.step for item in run.outputs.model_outputs) == [1, 2, 3, 4]
    assert all(str(model.status) == "READY" for model in client.search_logged_models([run.info.experiment_id]))


def test_more_than_one_page_of_checkpoints_comes_back(
    server: str, store_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mlflow_tracker, "_PAGE_LENGTH", 2)
    run_id = new_run(server)
    with open_store(store_root) as store, follow(store, MlflowTracker(run_id, tracking_uri=server)):
        for step in range(5):
            save(store, step)
    assert [item.step for item in references(run_id, tracking_uri=server)] == list(range(5))


def test_a_reference_that_was_half_told_is_finished(
    server: str, store_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer to each request in turn is lost; what is there in the end is one whole model."""
    from mlflow import MlflowClient

    run_id, client = new_run(server), MlflowClient(tracking_uri=server)
    names = ["create_logged_model", "log_batch", "log_outputs", "finalize_logged_model"]

    def losing(name: str) -> None:
        done = getattr(MlflowClient, name)

        def call(self: MlflowClient, *args: object, **keywords: object) -> object:
            answer = done(self, *args, **keywords)
            if name in names:
                names.remove(name)
                raise ConnectionError("the answer is lost")
            return answer

        monkeypatch.setattr(MlflowClient, name, call)

    for name in names:
        losing(name)
    with open_store(store_root) as store, follow(store, MlflowTracker(run_id, tracking_uri=server)):
        save(store, 1, loss=0.5)
    assert names == []
    (model,) = client.search_logged_models([client.get_run(run_id).info.experiment_id])
    assert (str(model.status), [(item.key, item.value) for item in model.metrics]) == ("READY", [("loss", 0.5)])
    assert [(item.value, item.step) for item in client.get_metric_history(run_id, "loss")] == [(0.5, 1)]
    assert [item.model_id for item in client.get_run(run_id).outputs.model_outputs] == [model.model_id]


def is_away(_wire: Wire) -> None:
    """The connection ends without an answer."""


def test_a_server_that_goes_away_and_comes_back(
    server: str, store_root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is behind a front; to start it takes half a minute."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with hostile_front(server) as (url, front), open_store(store_root) as store:
        run_id = new_run(server)
        following = follow(store, MlflowTracker(run_id, tracking_uri=url))
        save(store, 1, loss=1.0)
        assert following.flush(120)
        front.misbehave_on_wire(is_away, "POST", "")
        save(store, 2, loss=2.0)
        save(store, 3, loss=3.0)
        assert not following.flush(0.5)
        assert front.done
        front.behave()
        following.close()
        assert following.unsent == ()
        assert [item.step for item in references(run_id, tracking_uri=server)] == [1, 2, 3]
        assert checkpoint_of(run_id, step=2, tracking_uri=server).metrics == {"loss": 2.0}
    assert caplog.text.count("Training goes on") == 1
