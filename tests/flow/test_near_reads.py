"""A state is read from the copies on its node, and from the storage where those cannot be used."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptstore import CheckpointStore, open_store


def memory_store() -> CheckpointStore:
    return open_store(f"memory://{uuid.uuid4().hex}")


def state(step: int) -> dict[str, Any]:
    return {"w": torch.full((300, 300), float(step)), "epoch": step}


def test_the_cache_may_lie_below_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "scratch").symlink_to("disk")
    monkeypatch.setenv("CKPTSTORE_CACHE_DIR", str(tmp_path / "scratch/cache"))
    with memory_store() as store:
        store.save(1, state(1))
        found = state(0)
        store.load(found, read_once="node")
        assert found["epoch"] == 1
        assert list((tmp_path / "disk/cache").rglob("*.distcp"))
