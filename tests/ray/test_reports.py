"""Reports of a store to Ray's own context of a worker: a run of one worker, without a cluster.

`test_ckptstore_keeps.py` has the same with Ray.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import Queue
from typing import Any

import numpy as np
import pytest
import torch
from ray.exceptions import RayTaskError
from ray.train import CheckpointConfig
from ray.train.v2._internal.execution import context as contexts
from ray.train.v2._internal.execution import train_fn_utils
from ray.train.v2._internal.execution.checkpoint.checkpoint_manager import CheckpointManager
from ray.train.v2._internal.execution.checkpoint.sync_actor import SynchronizationBarrierResetError
from ray.train.v2._internal.execution.storage import StorageContext
from storing import make_run, worker_at
from thread_ranks import in_threads

import ckptstore
from ckptstore import InvalidInput, InvalidMetric, StorageFull, StorageGroup, open_store
from ckptstore.integrations.ray import ray_store, reports
from ckptstore.integrations.ray.kept_by_ray import reporting
from ckptstore.integrations.ray.metrics import REPLACED, Score
from ckptstore.testing import Call, with_faults

pytestmark = pytest.mark.slow


class OneWorker(contexts.TrainContext):
    """Ray's context of a worker that is alone, and meets nobody."""

    barrier_error: Exception | None = None

    def _sync_checkpoint_dir_name_across_ranks(self, checkpoint_dir_name: str | None = None) -> str:
        if self.barrier_error is not None:
            raise self.barrier_error
        return str(checkpoint_dir_name)


@pytest.fixture
def context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OneWorker:
    make_run(str(tmp_path / "run"))
    unused: Any = None
    made = OneWorker(
        train_run_context=unused,
        distributed_context=contexts.DistributedContext(0, 1, 0, 1, 0),
        execution_context=contexts.ExecutionContext(unused, Queue(), unused, []),
        storage_context=StorageContext(str(tmp_path), experiment_dir_name="run"),
        preemption_context=unused,
        controller_actor=unused,
        dataset_shard_provider=unused,
        has_validation_fn=False,
        report_order_condition=threading.Condition(),
        checkpoint_upload_threadpool=ThreadPoolExecutor(1),
    )
    monkeypatch.setattr(contexts, "_train_context", made)
    monkeypatch.setattr(train_fn_utils, "_train_fn_utils", train_fn_utils.DistributedTrainFnUtils())
    monkeypatch.setattr(ray_store, "current_worker", lambda: worker_at(str(tmp_path / "run")))
    return made


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "source").mkdir()
    (tmp_path / "source/model.pt").write_text("weights")
    return tmp_path / "source"


def reported(context: OneWorker) -> list[Any]:
    """What Ray has got since the last call, in the order of the reports."""
    context.checkpoint_upload_threadpool.submit(int).result()  # the one thread there has made those before
    queue = context.get_result_queue()
    return [queue.get() for _ in range(queue.qsize())]


@pytest.mark.timeout(60)
def test_a_save_that_ray_refuses_ends_with_its_error(context: OneWorker) -> None:
    with ckptstore.ray.store() as store, pytest.raises(ValueError, match="validation_config"):
        store.save_async(0, {"epoch": 0}, validation=True)


@pytest.mark.timeout(60)
def test_a_report_that_ray_leaves_out_is_not_waited_for(context: OneWorker) -> None:
    """Ray does so, without a word, where it puts new workers in the place of lost ones."""
    with ckptstore.ray.store() as store:
        context.barrier_error = RayTaskError("broadcast", "", SynchronizationBarrierResetError())
        store.save_async(0, {"epoch": 0})
        context.barrier_error = None
        store.save_async(1, {"epoch": 1})
    (report,) = reported(context)
    assert ckptstore.ray.resolve(report.checkpoint).step == 1


def saves_of(store: ckptstore.ray.RayStore, source: Path) -> list[Callable[..., Any]]:
    """Every way to save a step."""
    return [
        partial(store.save, state={"epoch": 0}),
        partial(store.save_async, state={"epoch": 0}),
        partial(store.save_async, state={"epoch": 0}, on_busy="skip"),
        partial(store.save_directory, path=source),
    ]


def test_retention_by_what_ray_measures_later_is_refused(context: OneWorker, source: Path) -> None:
    context.has_validation_fn = True
    with ckptstore.ray.store(retention=ckptstore.KeepBest(2, metric="acc", mode="max")) as store:
        for step, save in enumerate(saves_of(store, source)):
            with pytest.raises(InvalidInput, match=r"ranks by 'acc'.*ckptstore\.ray\.report"):
                save(step, metrics={"loss": 1.0}, validation=True)
        assert not store.exists()
        store.save(4, {"epoch": 0}, metrics={"acc": 0.5}, validation=True)
    assert [report.validation for report in reported(context)] == [True]


def test_a_checkpoint_in_the_trash_can_still_be_validated(context: OneWorker) -> None:
    context.has_validation_fn = True
    with ckptstore.ray.store(retention=ckptstore.KeepLatest(1)) as store:
        for step in range(3):
            store.save(step, {"epoch": step}, validation=True)
        assert [checkpoint.step for checkpoint in store] == [2]
    for step, report in enumerate(reported(context)):
        assert ckptstore.ray.resolve(report.checkpoint).to_dict() == {"epoch": step}


def test_a_validation_of_no_checkpoint_is_refused_as_by_ray(
    context: OneWorker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(reporting, "current_worker", lambda: worker_at(str(tmp_path / "run")))
    with pytest.raises(ValueError, match="Validation requires a checkpoint"):
        ckptstore.ray.report({"loss": 1.0}, validation=True)


def test_a_pointer_that_cannot_be_written_fails_no_save(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """All ranks report the metrics alone then: one that reported a checkpoint would wait at Ray's barrier."""
    place, told = threading.local(), []
    (tmp_path / "run").write_text("no directory")
    monkeypatch.setenv("CKPTSTORE_RETRY_ATTEMPTS", "1")
    monkeypatch.setattr(
        ray_store, "current_worker", lambda: worker_at(str(tmp_path / "run"), rank=place.rank, world_size=2)
    )
    monkeypatch.setattr(
        reports,
        "report_to_ray",
        lambda metrics, checkpoint=None, **_: told.append((metrics["ckptstore_step"], checkpoint is not None)),
    )

    def run(rank: int) -> None:
        place.rank = rank
        with ckptstore.ray.store(tmp_path / "store", group=StorageGroup(rank, 2, "start")) as store:
            store.save(0, {"epoch": 0})
            if rank == 0:
                (tmp_path / "run").unlink()
            assert [checkpoint.step for checkpoint in store] == [0]
            store.save(1, {"epoch": 1})

    assert in_threads(2, run) == [None, None]
    assert told == [(0, False), (0, False), (1, True), (1, True)]
    assert "step 0 is committed, and Ray hears of it at the next start: Writing" in caplog.text


def test_a_save_that_would_not_be_reported_is_refused(context: OneWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    with ckptstore.ray.store() as store:
        with pytest.raises(InvalidInput, match=r"not reported to Ray.*store\.save"):
            store.dcp_target()
        monkeypatch.setattr(ray_store, "current_worker", lambda: None)
        with ckptstore.ray.store(store.uri) as outside:
            assert outside.dcp_target(metrics={"loss": 1.0}).uri == store.uri


@pytest.mark.parametrize(
    "metrics",
    [{"loss": "good"}, {"loss": np.zeros(2)}, {"loss": 0.5, "large": 10**400}, {"loss": 0.5, "odd": 2**53 + 1}],
)
def test_metrics_that_ray_or_the_store_refuses_are_refused_before_the_save(
    context: OneWorker, monkeypatch: pytest.MonkeyPatch, source: Path, tmp_path: Path, metrics: dict[str, Any]
) -> None:
    worker = replace(worker_at(str(tmp_path / "run")), score=Score("loss", "min"))
    monkeypatch.setattr(ray_store, "current_worker", lambda: worker)
    with ckptstore.ray.store() as store:
        for step, save in enumerate(saves_of(store, source)):
            with pytest.raises(InvalidMetric, match=r"the metric '(loss|large|odd)'"):
                save(step, metrics=metrics)
        assert not store.exists()
        store.save(4, {"epoch": 0}, metrics={"loss": torch.tensor([0.5])})
        assert store[4].metrics == {"loss": 0.5}
    assert [report.metrics["loss"] for report in reported(context)] == [0.5]


def test_bad_metrics_of_one_rank_are_refused_on_all(source: Path, tmp_path: Path) -> None:
    def run(rank: int) -> None:
        with ckptstore.ray.store(tmp_path / "store", group=StorageGroup(rank, 2, "start")) as store:
            for step, save in enumerate(saves_of(store, source)):
                with pytest.raises(InvalidMetric, match="'loss' is "):
                    save(step, metrics={"loss": object() if rank else 0.5})
            assert not store.exists()
            store.save(4, {"epoch": 0}, metrics={"loss": 0.5})

    assert in_threads(2, run) == [None, None]


@pytest.mark.parametrize("nested", [{"val/loss": 0.1}, {"val": {"loss": 0.1}}, {"val/loss": 0.1, "val": {"loss": 0.1}}])
def test_a_failed_save_ranks_last_wherever_its_score_is(
    context: OneWorker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, nested: dict[str, Any]
) -> None:
    def fill(call: Call) -> None:
        if call.key.endswith(".distcp"):
            raise StorageFull("no space")

    worker = replace(worker_at(str(tmp_path / "run")), score=Score("val/loss", "min"))
    monkeypatch.setattr(ray_store, "current_worker", lambda: worker)
    monkeypatch.setattr(ray_store, "open_store", lambda *given, **kw: with_faults(open_store(*given, **kw), fill))
    with ckptstore.ray.store() as store:
        store.save_async(1, {"epoch": 1}, metrics=nested, max_failures=1)
    (report,) = reported(context)
    config = CheckpointConfig(checkpoint_score_attribute="val/loss", checkpoint_score_order="min")
    rank = CheckpointManager(config, context.storage_context)._get_checkpoint_score(report)
    assert rank == (True, -sys.float_info.max)
    assert report.metrics[REPLACED] == {"val/loss": "save failed"}
