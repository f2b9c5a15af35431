"""A process that may start no thread of ours: the caller does the work, and nothing is lost."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_ranks import run_ranks

import ckptstore
from ckptstore import FastTier, KeepLatest
from ckptstore.testing.s3_server import s3_server

pytestmark = pytest.mark.slow


@pytest.fixture(params=["disk", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    if request.param == "disk":
        yield str(tmp_path / "store"), {}
        return
    with s3_server(buckets=["test"]) as server:
        yield "s3://test/run", server.storage_options


@contextmanager
def no_threads() -> Iterator[set[str]]:
    """Refuse threads of ours while the context lasts; the set gets their names."""
    start = threading.Thread.start
    refused: set[str] = set()

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith("ckptstore"):
            refused.add(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        yield refused


def live_without_threads(uri: str, options: dict[str, Any], directory: str, group: str | None = None) -> set[str]:
    """Save, load and prune, and return the names of the threads that were wanted."""
    with no_threads() as refused:
        state = {"w": torch.ones(1 << 18), "steps": torch.arange(3)}
        with ckptstore.open_store(
            uri, group=group, storage_options=options, retention=KeepLatest(2), grace_seconds=0
        ) as store:
            store.save(1, state)
            for step in (2, 3):
                store.save_async(step, state).result()
            latest = store.resume(state)
            assert latest.step == 3
            assert torch.equal(latest.to_dict()["w"], state["w"])
            latest.to_directory(directory)
            with latest.as_directory() as path:
                assert path.is_dir()
            assert [checkpoint.step for checkpoint in store.follow(timeout_seconds=0.1)] == [2, 3]
            assert store.trash() == [], "step 1 was pruned, by the save itself"
    return refused


def test_a_process(place: tuple[str, dict[str, Any]], tmp_path: Path) -> None:
    refused = live_without_threads(*place, str(tmp_path / "copy"), "solo")
    assert {"ckptstore-prune", "ckptstore-save", "ckptstore-transfer-0"} <= refused


def rank_without_threads(uri: str, directory: str) -> set[str]:
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    return live_without_threads(uri, {}, f"{directory}/{rank}")


def test_ranks_that_meet_through_torch(tmp_path: Path) -> None:
    for refused in run_ranks(2, rank_without_threads, str(tmp_path / "store"), str(tmp_path), timeout_seconds=120):
        assert {"ckptstore-group", "ckptstore-save"} <= refused


def test_fast_checkpoints_stay_on_the_node(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root, tier = tmp_path / "store", FastTier(tmp_path / "nvme", keep=2)
    with no_threads() as refused, ckptstore.open_store(root, group="solo", fast=tier) as store:
        store.save(1, {"w": torch.ones(8)})
        store.save_async(2, {"w": torch.full((8,), 2.0)}).result()
    assert "ckptstore-drain" in refused
    assert "stay on the nodes" in caplog.text
    state = {"w": torch.zeros(8)}
    with ckptstore.open_store(root, group="solo", fast=tier) as store:
        resumed = store.resume(state)
        assert (resumed is not None, state["w"].tolist()) == (True, [2.0] * 8)
