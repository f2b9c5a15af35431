"""Ranks and nodes come from Ray's own context, and from nowhere where there is none."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from cluster import RayCluster, fit

import ckptstore
from ckptstore import InvalidInput
from ckptstore.integrations.ray.context import current_worker, require_worker


def report_worker(config: dict[str, Any]) -> None:
    import ray.train

    worker = current_worker()
    assert worker is not None
    assert worker.broadcast(f"from rank {worker.rank}") == "from rank 0"
    told = f"{worker.rank}/{worker.world_size} {worker.node_id} {worker.run_name} {worker.path_of('there')}"
    Path(config["directory"], str(worker.rank)).write_text(told)
    ray.train.report({"loss": 1.0})


def test_a_worker_knows_its_place(cluster: RayCluster, tmp_path: Path) -> None:
    config = {"directory": str(tmp_path)}
    fit(report_worker, storage_path=tmp_path / "runs", name="here", config=config, num_workers=4)
    told = [(tmp_path / str(rank)).read_text().split() for rank in range(4)]
    assert [item[0] for item in told] == ["0/4", "1/4", "2/4", "3/4"]
    assert len({item[1] for item in told}) == 2
    assert {item[2] for item in told} == {"here"}
    assert {item[3] for item in told} == {str(tmp_path / "runs" / "here" / "there")}


def test_in_the_driver_there_is_no_worker(cluster: RayCluster) -> None:
    assert current_worker() is None
    with pytest.raises(InvalidInput, match="report was called outside of a worker"):
        require_worker("report")


def in_local_mode(config: dict[str, Any]) -> None:
    import ray.train

    ray.train.report({"has_worker": current_worker() is not None, "pid": os.getpid()})


def test_in_local_mode_there_is_no_worker(cluster: RayCluster, tmp_path: Path) -> None:
    result = fit(in_local_mode, storage_path=tmp_path, name="local", num_workers=0, torch=True)
    assert result.metrics == {"has_worker": False, "pid": os.getpid()}


def test_the_integration_is_a_name_of_the_package() -> None:
    assert ckptstore.ray.current_worker is current_worker
