"""What follows a commit delays and fails nothing, whatever the server answers to it: hints, prunes, farewells."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ckptstore
from ckptstore.config import RetryConfig
from ckptstore.events import PruneFailed, listening
from ckptstore.storage.memory import MemoryStorage
from ckptstore.storage.retry import with_retries
from ckptstore.testing.faults import FailAt, wrap
from ckptstore.testing.s3_server import Fault, S3Server, s3_server

LONG_SECONDS = 60.0
"""Less than what the retries of one request take, far more than a save here."""
ANSWERS: dict[str, dict[str, Any]] = {
    "throttles": {"action": "status", "status": 429, "code": "TooManyRequests"},
    "refuses": {"action": "status", "status": 403, "code": "AccessDenied"},
    "fails": {"action": "status", "status": 500, "code": "InternalError"},
    "is silent": {"action": "stall"},
}
HINT = "^PUT .*latest.json"
DELETIONS = "^(POST .*[?]delete|DELETE)"


@pytest.fixture
def server() -> Iterator[S3Server]:
    with s3_server(buckets=["test"]) as server:
        yield server


@pytest.fixture
def files(tmp_path: Path) -> Path:
    directory = tmp_path / "files"
    directory.mkdir()
    (directory / "f.bin").write_bytes(b"bytes")
    return directory


def in_time(call: Any) -> Any:
    """The result of a call that ends long before retries would."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(call()), daemon=True)
    thread.start()
    thread.join(LONG_SECONDS)
    assert results, "it waits"
    return results[0]


@pytest.mark.parametrize("answer", ANSWERS)
def test_a_hint_delays_nothing(
    server: S3Server, files: Path, answer: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckptstore.job._IDLE_SECONDS", 1.0)
    store = ckptstore.open_store("s3://test/hint", storage_options=server.storage_options)
    store.save_directory(0, files)
    server.faults.add(Fault(match=HINT, times=None, **ANSWERS[answer]))
    with caplog.at_level(logging.WARNING, logger="ckptstore"):
        for step in (1, 2):
            assert in_time(lambda step=step: store.save_directory(step, files)).step == step
        in_time(store.close)
    assert any("latest.json" in record.message for record in caplog.records), "a line says so"
    server.faults.clear()
    with ckptstore.open_store("s3://test/hint", storage_options=server.storage_options) as again:
        assert [found.step for found in again] == [0, 1, 2]
        assert again.save_directory(3, files).step == 3


@pytest.mark.parametrize("answer", ANSWERS)
def test_a_prune_delays_nothing(server: S3Server, files: Path, answer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptstore.job._IDLE_SECONDS", 1.0)
    events: list[Any] = []
    options: dict[str, Any] = {
        "storage_options": server.storage_options,
        "retention": ckptstore.KeepLatest(1),
        "grace_seconds": 0,
    }
    with listening(events.append, PruneFailed):
        store = ckptstore.open_store("s3://test/prune", **options)
        store.save_directory(0, files)
        server.faults.add(Fault(match=DELETIONS, times=None, **ANSWERS[answer]))
        for step in range(1, 4):
            assert in_time(lambda step=step: store.save_directory(step, files)).step == step
        in_time(store.close)
    assert events, "a line says so"


def test_a_prune_tries_twice_at_most() -> None:
    fails = FailAt("delete *", times=None)
    storage = with_retries(wrap(MemoryStorage("memory://prune"), fails), RetryConfig(retry_wait_max_seconds=0.01))
    with ckptstore.open_store("memory://prune") as store:
        store._job.prune_in_background(lambda: storage.delete(["key"]))
        store._job.wait_for_prune()
    assert fails.struck == 2


def test_a_slow_prune_is_waited_for(server: S3Server, files: Path) -> None:
    """One that goes on gives signs of life."""
    options: dict[str, Any] = {
        "storage_options": server.storage_options,
        "retention": ckptstore.KeepLatest(1),
        "grace_seconds": 0,
    }
    with ckptstore.open_store("s3://test/slow", **options) as store:
        server.faults.add(Fault(action="delay", seconds=0.2, match=DELETIONS, times=None))
        for step in range(3):
            store.save_directory(step, files)
            store._job.wait_for_prune()
    manifests = [key for key in server.objects.buckets["test"] if key.endswith("/ckptstore.json")]
    assert len(manifests) == 1


@pytest.mark.parametrize("answer", ["throttles", "fails"])
def test_leaving_a_group_delays_nothing(server: S3Server, files: Path, answer: str) -> None:
    group = ckptstore.StorageGroup(rank=0, world_size=1, start_token=f"t{time.time_ns()}")
    store = ckptstore.open_store("s3://test/group", storage_options=server.storage_options, group=group)
    store.save_directory(0, files)
    server.faults.add(Fault(match="/group/", times=None, **ANSWERS[answer]))
    in_time(store.close)
