"""A state is read from the copies on its node, and from the storage where those cannot be used."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from thread_ranks import in_threads

from ckptstore import CheckpointStore, StorageGroup, open_store
from ckptstore.loading.story import NodeCopies
from ckptstore.storage.disk import posix
from ckptstore.testing.s3_server import s3_server


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


def loads_newest(store: CheckpointStore) -> bool:
    found = state(0)
    store.resume(found, read_once="node")
    return bool(found["epoch"] == 2 and found["w"].eq(2).all())


def spoil(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.chmod(0o600)
    path.write_bytes(data)


@pytest.mark.parametrize("harm", [spoil, Path.unlink])
@pytest.mark.parametrize("pattern", ["tensors.index", "*.distcp"])
def test_a_copy_that_is_spoiled_or_lost_is_no_damage(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    harm: Callable[[Path], None],
    pattern: str,
) -> None:
    path_of = NodeCopies.path

    def harmed(copies: NodeCopies, name: str) -> Path:
        path = path_of(copies, name)
        if path.match(pattern):
            harm(path)
        return path

    with memory_store() as store:
        for step in (1, 2):
            store.save(step, state(step))
        with monkeypatch.context() as patched:
            patched.setattr(NodeCopies, "path", harmed)
            assert loads_newest(store)
        (warning,) = [record.getMessage() for record in caplog.records]
        assert "A copy of step 2 in the node cache" in warning
        caplog.clear()
        assert loads_newest(store)  # from a new copy
        assert not caplog.records


def too_full(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setattr(posix, "free_bytes", lambda directory: 60 << 20)


def not_writable(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    cache.write_bytes(b"a file, so root cannot make it either")


@pytest.mark.parametrize("fault", [too_full, not_writable])
def test_ranks_need_no_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Callable[[pytest.MonkeyPatch, Path], None]
) -> None:
    monkeypatch.setenv("CKPTSTORE_CACHE_DIR", str(tmp_path / "cache"))
    fault(monkeypatch, tmp_path / "cache")
    with s3_server(buckets=["b"]) as server:

        def flow(rank: int) -> Any:
            group = StorageGroup(rank, 2, "start")
            with open_store("s3://b/run", group=group, storage_options=server.storage_options) as store:
                store.save(1, state(1))
                found = state(0)
                store.load(found)
                return found["epoch"]

        assert in_threads(2, flow) == [1, 1]
