"""Requests and retries of a save on S3, as its timings have them, against what the server has counted."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptstore
from ckptstore.testing.s3_server import Fault, S3Server

pytestmark = pytest.mark.slow

NUM_FILES = 5


@pytest.fixture(autouse=True)
def _quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTSTORE_RETRY_WAIT_INITIAL_SECONDS", "0.01")
    monkeypatch.setenv("CKPTSTORE_RETRY_WAIT_MAX_SECONDS", "0.05")


def some_store(server: S3Server, **keywords: Any) -> ckptstore.CheckpointStore:
    uri = f"s3://test/timings/{os.urandom(4).hex()}"
    return ckptstore.open_store(uri, storage_options=server.storage_options, **keywords)


def some_files(path: Path, *, large_bytes: int = 0) -> Path:
    path.mkdir(parents=True)
    for index in range(NUM_FILES):
        (path / f"f{index}.bin").write_bytes(os.urandom(1000))
    if large_bytes:
        (path / "large.bin").write_bytes(bytes(large_bytes))
    return path


def uploads(server: S3Server, seen: int, *, suffix: str = ".bin") -> Counter[str]:
    """The requests for the files themselves since then, by how the server answered."""
    return Counter(
        "failed" if request.status >= 400 else "done" for request in server.log[seen:] if suffix in request.path
    )


def timings_of(checkpoint: ckptstore.Checkpoint | None) -> Any:
    assert checkpoint is not None
    assert checkpoint.timings is not None
    return checkpoint.timings


def test_requests_and_retries_are_those_of_the_server(fast_s3: S3Server, tmp_path: Path) -> None:
    with some_store(fast_s3) as store:
        seen = len(fast_s3.log)
        timings = timings_of(store.save_directory(1, some_files(tmp_path / "1", large_bytes=40 << 20)))
        assert uploads(fast_s3, seen) == {"done": timings.requests} == {"done": NUM_FILES + 5}
        assert timings.retries == 0
        assert timings.size_bytes == NUM_FILES * 1000 + (40 << 20)

        fast_s3.faults.replace([Fault(action="status", status=503, code="SlowDown", match=r"^PUT .*\.bin", times=3)])
        seen = len(fast_s3.log)
        timings = timings_of(store.save_directory(2, some_files(tmp_path / "2", large_bytes=40 << 20)))
        assert uploads(fast_s3, seen) == {"done": NUM_FILES + 5, "failed": 3}
        assert (timings.requests, timings.retries) == (NUM_FILES + 5 + 3, 3)


def test_an_upload_in_the_background_counts_too(fast_s3: S3Server) -> None:
    state = {"w": torch.ones(1 << 20), "epoch": 3}
    with some_store(fast_s3) as store:
        store.warm_up(state)
        fast_s3.faults.replace([Fault(action="status", status=503, code="SlowDown", match=r"^PUT .*\.distcp", times=2)])
        seen = len(fast_s3.log)
        timings = timings_of(store.save_async(1, state).result())
        counted = uploads(fast_s3, seen, suffix=".distcp")
        assert counted["failed"] == timings.retries == 2
        assert counted.total() == timings.requests
        assert timings.size_bytes >= 4 << 20


def test_two_saves_at_once_are_counted_apart(fast_s3: S3Server, tmp_path: Path) -> None:
    """Two stores of one process, whose saves run at the same time, each on threads of its own."""
    state = {"w": torch.ones(8 << 20)}
    one_file = {"w": torch.ones(8)}
    with some_store(fast_s3) as first, some_store(fast_s3) as second:
        alone = timings_of(first.save(1, state)).requests, timings_of(second.save(1, one_file)).requests
        pending = [first.save_async(2, state), second.save_async(2, one_file)]
        counted = [timings_of(one.result()) for one in pending]
    assert tuple(one.requests for one in counted) == alone
    assert alone[0] > alone[1]
    assert [one.size_bytes > 1 << 20 for one in counted] == [True, False]
