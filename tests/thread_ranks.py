"""The ranks of a job as threads of one process: for flows and tensors that need no real process."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ckptstore import CheckpointStore, StorageGroup, open_store
from ckptstore.errors import CkptstoreError
from ckptstore.storage.memory import MemoryStorage

RANK_TIMEOUT_SECONDS = 30
_starts = itertools.count()


def in_threads(n: int, function: Callable[[int], Any]) -> list[Any]:
    """Return the result of the function for each rank, or the error of the library that it raises; raise any other."""
    ends: list[Any] = [None] * n
    raised: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            ends[rank] = function(rank)
        except CkptstoreError as error:
            ends[rank] = error
        except BaseException as error:
            ends[rank] = error
            raised.append(error)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive(), f"a rank hangs; so far: {ends}"
    if raised:
        raise raised[0]
    return ends


def run_threads(
    world_size: int, place: str | Path, flow: Callable[[CheckpointStore, int], Any], **options: Any
) -> list[Any]:
    """Call `flow(store, rank)` on every rank of a new start of a job; what a rank raises is its result.

    The ranks of a store in memory, where the library lets no ranks meet, meet at a board beside it.
    """
    token = f"start{next(_starts)}"
    board = MemoryStorage(f"memory://board-{token}")

    def run(rank: int) -> Any:
        group: Any = StorageGroup(rank, world_size, token)
        if world_size > 1 and str(place).startswith("memory://"):
            group = group.open(board, rank_timeout_seconds=RANK_TIMEOUT_SECONDS)
        with open_store(str(place), group=group, **{"rank_timeout_seconds": RANK_TIMEOUT_SECONDS, **options}) as store:
            return flow(store, rank)

    return in_threads(world_size, run)
