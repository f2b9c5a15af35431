"""A checkpoint that is sent to another process opens itself there."""

from __future__ import annotations

import multiprocessing
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptstore import Checkpoint, InvalidInput, open_store
from ckptstore.format.changes import Claim
from ckptstore.format.record import Record
from ckptstore.loading.checkpoint_files import CheckpointFiles, CommittedFiles

pytestmark = pytest.mark.slow


def look_at(data: bytes) -> tuple[object, ...]:
    checkpoint = pickle.loads(data)
    state = {"a": torch.zeros(3)}
    checkpoint.load(state)
    with checkpoint.as_directory() as path:
        names = sorted(item.name for item in path.iterdir())
    return checkpoint.step, checkpoint.number, checkpoint.metrics, checkpoint.uri, state["a"].tolist(), names


def test_another_process_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_store(tmp_path / "store", durable=False) as store:
        sent = store.save(7, {"a": torch.ones(3)}, metrics={"loss": 0.5})
        assert pickle.loads(pickle.dumps(sent)) == sent
    monkeypatch.setenv("WORLD_SIZE", "4")  # as in a worker of a data loader
    monkeypatch.setenv("RANK", "2")
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        step, number, metrics, uri, values, names = pool.apply(look_at, [pickle.dumps(sent)])
        alone = pool.apply(look_at, [pickle.dumps(Checkpoint.from_uri(sent.uri))])
    assert (step, number, metrics, uri, values) == (7, sent.number, {"loss": 0.5}, sent.uri, [1.0, 1.0, 1.0])
    assert {file.name for file in sent.files} <= set(names)
    assert alone[0] == 7
    assert alone[4] == [1.0, 1.0, 1.0]


def test_no_secret_travels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    options = {"key": "AKIACANARY", "secret": "canary-secret", "endpoint_url": "http://canary.invalid:9"}
    with open_store("s3://bucket/run", storage_options=options) as store:
        job = store._job
        place: Any = {"storage": job.storage, "transfer": job.transfer, "config": job.config}
        parts = {**place, "prefix": "checkpoints/x/"}
        record = Record.following(None, Claim("token", 2), write_id="w", created_at=0.0)
        for files in (CheckpointFiles(**parts), CommittedFiles(**parts, record=record, job=job)):
            data = pickle.dumps(Checkpoint(files))
            assert b"canary" not in data.lower()
            assert pickle.loads(data).uri == "s3://bucket/run/checkpoints/x"


def test_what_lives_in_memory_cannot_be_sent() -> None:
    with open_store("memory://sent") as store:
        checkpoint = store.save_directory(1, None)
        with pytest.raises(InvalidInput, match="lives in the memory of this process"):
            pickle.dumps(checkpoint)
