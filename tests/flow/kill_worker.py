"""What the processes of the kill tests run: small flows, killed at one call of their storage."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ckptstore import KeepLatest, StorageGroup, open_store
from ckptstore.checkpoint import Checkpoint
from ckptstore.errors import CkptstoreError
from ckptstore.loading.story import CheckpointFiles
from ckptstore.storage.base import StoredFile
from ckptstore.storage.disk.local import LocalStorage
from ckptstore.store import CheckpointStore
from ckptstore.testing import Call, CountCalls, KillAt, wrap
from ckptstore.testing.stores import with_faults
from ckptstore.transfer import Transfer

READING = {"read", "stat", "list", "free_bytes", "local_path"}


def changes_something(call: Call) -> bool:
    """Whether a kill at this call can leave another storage than a kill at the call before it."""
    return call.verb not in READING


def nth_change(index: int) -> Any:
    """A match for the change with that index, to be used once."""
    seen = iter(range(10**9))
    return lambda call: changes_something(call) and next(seen) == index


def save_step(
    root: str,
    token: str,
    source: str,
    step: int,
    victim: int | None,
    index: int,
    when: str,
    rank_timeout_seconds: float,
) -> str:
    """One rank of a save; the victim dies at its `index`-th change. Returns what came of it."""
    rank = int(os.environ["RANK"])
    group = StorageGroup(rank, int(os.environ["WORLD_SIZE"]), token)
    store = open_store(
        root, group=group, rank_timeout_seconds=rank_timeout_seconds, grace_seconds=0, retention=KeepLatest(1)
    )
    if rank == victim:
        store = with_faults(store, KillAt(nth_change(index), when=when))  # type: ignore[arg-type]
    try:
        store.save_directory(step, Path(source) / f"rank{rank}")
        store.close()
    except CkptstoreError as error:
        return f"{type(error).__name__} committed={error.committed}"
    return "saved"


def count_changes(root: str, token: str, source: str, step: int) -> list[str]:
    """The keys that a rank of the same save changes, in their order."""
    rank = int(os.environ["RANK"])
    counted = CountCalls()
    group = StorageGroup(rank, int(os.environ["WORLD_SIZE"]), token)
    store = with_faults(
        open_store(root, group=group, grace_seconds=0, retention=KeepLatest(1)),
        counted,
    )
    store.save_directory(step, Path(source) / f"rank{rank}")
    store.close()
    return [call.key for call in counted.calls if changes_something(call)]


def prune_once(root: str, index: int, when: str) -> int:
    """A prune that dies at its `index`-th change; returns how many changes it made if it lives."""
    counted = CountCalls()

    def hook(call: Call) -> None:
        counted(call)
        kill(call)

    kill = KillAt(nth_change(index), when=when)  # type: ignore[arg-type]
    store: CheckpointStore = with_faults(open_store(root, grace_seconds=0), hook)
    store.prune()
    return sum(changes_something(call) for call in counted.calls)


class Remote:
    """A disk that has no paths to give away, as an object store has none."""

    def __init__(self, root: str) -> None:
        self.disk = LocalStorage(root)
        self.uri = f"remote:{root}"

    def write(self, key: str, views: Sequence[memoryview]) -> None:
        self.disk.write(key, views)

    def read(self, key: str) -> bytes:
        return self.disk.read(key)

    def read_into(self, key: str, offset: int, views: Sequence[memoryview], *, version: str | None = None) -> None:
        self.disk.read_into(key, offset, views, version=version)

    def stat(self, key: str) -> StoredFile:
        return self.disk.stat(key)

    def list(self, prefix: str) -> Iterator[StoredFile]:
        return self.disk.list(prefix)

    def delete(self, keys: Sequence[str]) -> None:
        self.disk.delete(keys)

    def close(self) -> None:
        self.disk.close()


def open_remotely(directory: str, hook: Any) -> Checkpoint:
    """A checkpoint directory as if it lay on an object store."""
    config = open_store("memory://config")._job.config
    storage = wrap(Remote(directory), hook)
    transfer = Transfer(storage, config=config.transfer, retry=config.retry)
    return Checkpoint(CheckpointFiles(storage=storage, transfer=transfer, config=config, prefix="", record=None))


def download(directory: str, index: int, when: str) -> tuple[int, dict[str, int]]:
    """A download into the node cache that dies at its `index`-th call; else the number of calls and what it saw."""
    counted = CountCalls()
    seen = iter(range(10**9))
    kill = KillAt(lambda _call: next(seen) == index, when=when)  # type: ignore[arg-type]

    def hook(call: Call) -> None:
        counted(call)
        kill(call)

    with open_remotely(directory, hook).as_directory() as path:
        found = {file.name: file.stat().st_size for file in path.iterdir()}
    return counted.total, found
