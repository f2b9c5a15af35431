"""Finding checkpoints: what `latest()` and a listing cost, in requests and seconds, as a store grows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from versus import FULL

from ckptstore import open_store
from ckptstore.bench.destination import Place
from ckptstore.bench.workloads.finding import fill
from ckptstore.format.record import Record
from ckptstore.testing import CountCalls
from ckptstore.testing.stores import with_faults


@pytest.mark.parametrize("num_checkpoints", [1, 100, 10_000 if FULL else 1_000])
def test_latest(benchmark: Any, tmp_path: Path, num_checkpoints: int) -> None:
    fill(str(tmp_path / "store"), Place(uri=str(tmp_path)), num_checkpoints)
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
    fill(str(tmp_path / "store"), Place(uri=str(tmp_path)), num_checkpoints)
    counted = CountCalls()

    def listing() -> None:
        counted.clear()
        with with_faults(open_store(tmp_path / "store"), counted) as store:
            assert len(store.entries()) == num_checkpoints

    benchmark.pedantic(listing, rounds=5)
    benchmark.extra_info["requests"] = dict(counted.counts)
