"""Finding checkpoints: what `latest()` and a listing cost, in requests and seconds, as a store grows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from versus import FULL

from ckptstore import open_store
from ckptstore.config import RetryConfig
from ckptstore.identity import read_or_create_identity
from ckptstore.log import Log
from ckptstore.records import CheckpointEntry, Claim, Commit, Record
from ckptstore.storage.local import LocalStorage
from ckptstore.testing import CountCalls
from ckptstore.testing.stores import with_faults


def fill(root: Path, num_checkpoints: int) -> None:
    """A store whose log says that it holds so many checkpoints."""
    storage = LocalStorage(root, durable=False)
    read_or_create_identity(storage)
    log = Log(storage, retry=RetryConfig())
    log.append(lambda _: Claim(start_token="bench", world_size=8))
    for step in range(num_checkpoints):
        entry = CheckpointEntry(
            step=step,
            epoch=1,
            attempt=f"step-{step:010d}-e0001-0123abcd",
            manifest_sha256="0" * 64,
            kind="state",
            world_size=8,
            size_bytes=10**9,
            num_files=16,
            created_at=1.8e9 + step,
            metrics={"loss": 1.0 / (1 + step)},
        )
        log.append(lambda _: Commit(entry=entry))  # noqa: B023 - called before the loop goes on


@pytest.mark.parametrize("num_checkpoints", [1, 100, 10_000 if FULL else 1_000])
def test_latest(benchmark: Any, tmp_path: Path, num_checkpoints: int) -> None:
    fill(tmp_path / "store", num_checkpoints)
    counted = CountCalls()

    def latest() -> Record | None:
        counted.clear()
        with with_faults(open_store(tmp_path / "store"), counted) as store:
            found = store.latest()
        assert found is not None
        assert found.step == num_checkpoints - 1
        return None

    benchmark.pedantic(latest, rounds=5)
    benchmark.extra_info["requests"] = dict(counted.counts)
    assert counted.total - counted.counts["close"] <= 2


@pytest.mark.parametrize("num_checkpoints", [1_000 if FULL else 100])
def test_listing(benchmark: Any, tmp_path: Path, num_checkpoints: int) -> None:
    fill(tmp_path / "store", num_checkpoints)
    counted = CountCalls()

    def listing() -> None:
        counted.clear()
        with with_faults(open_store(tmp_path / "store"), counted) as store:
            assert len(store.entries()) == num_checkpoints

    benchmark.pedantic(listing, rounds=5)
    benchmark.extra_info["requests"] = dict(counted.counts)
