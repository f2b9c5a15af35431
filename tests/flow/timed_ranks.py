"""What the processes of the tests of timings run: saves of files through a directory, where one rank may be slow."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ckptstore import CkptstoreError, StorageGroup, open_store
from ckptstore.events import Event, SavePhase, listening
from ckptstore.testing import Delay, KillAt
from ckptstore.testing.stores import with_faults

WRITES = ("write", "write_many", "write_part")


def save_files(root: str, slow_rank: int, seconds: float, kill_rank: int) -> dict[str, Any]:
    """Save a file of each rank; gives the timings, or the error, and the phases that this rank heard of."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    group = StorageGroup(rank, world_size, "timed", node=f"node-{rank}")
    store = open_store(root, group=group, rank_timeout_seconds=60 if kill_rank < 0 else 5)
    if rank == slow_rank:
        store = with_faults(store, Delay(dict.fromkeys(WRITES, seconds)))
    if rank == kill_rank:
        store = with_faults(store, KillAt("write* checkpoints/*"))
    source = Path(root).parent / f"source-{rank}"
    source.mkdir()
    (source / f"model-{rank}.pt").write_bytes(bytes(10_000 * (rank + 1)))
    heard: list[Event] = []
    with listening(heard.append), store:
        try:
            checkpoint = store.save_directory(1, source)
        except CkptstoreError as error:
            return {"error": type(error).__name__, "live": [one.step for one in store]}
        return {
            "timings": checkpoint.timings.to_json(),
            "attempt": checkpoint.uri.rpartition("/")[2],
            "phases": [event for event in heard if isinstance(event, SavePhase)],
        }
