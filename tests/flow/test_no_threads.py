"""A process that may start no thread of ours: the caller does the work, and nothing is lost."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptstore
from ckptstore import KeepLatest
from ckptstore.testing.s3_server import s3_server


@pytest.fixture(params=["disk", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    if request.param == "disk":
        yield str(tmp_path / "store"), {}
        return
    with s3_server(buckets=["test"]) as server:
        yield "s3://test/run", server.storage_options


def test_it_saves_loads_and_prunes(
    place: tuple[str, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri, options = place
    start = threading.Thread.start
    refused: list[str] = []

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith("ckptstore"):
            refused.append(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    state = {"w": torch.randn(1 << 18), "model": torch.nn.Linear(2, 2)}
    with ckptstore.open_store(
        uri, group="solo", storage_options=options, retention=KeepLatest(2), grace_seconds=0
    ) as store:
        store.save(1, state)
        for step in (2, 3):
            store.save_async(step, state).result()
        latest = store.resume(state)
        assert latest is not None
        assert latest.step == 3
        assert torch.equal(latest.to_dict()["w"], state["w"])
        latest.to_directory(tmp_path / "copy")
        with latest.as_directory() as path:
            assert path.is_dir()
        assert [checkpoint.step for checkpoint in store.follow(timeout_seconds=0.1)] == [2, 3]
        assert store.trash() == [], "step 1 was pruned, by the save itself"
    assert {"ckptstore-prune-0", "ckptstore-save", "ckptstore-transfer-0"} <= {*refused}
