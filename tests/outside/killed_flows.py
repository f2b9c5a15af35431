"""What the sweep kills: `python killed_flows.py FLOW RANK WORLD TOKEN ROOT GIVEN`. Prints what came of it.

Everything is imported and opened first; then the process stops itself, if TRACED is set, until its tracer is there.
A flow of a state loads torch, the others do not.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from ckptstore import KeepLatest, StorageGroup, open_store
from ckptstore.errors import CkptstoreError
from ckptstore.store import CheckpointStore

STEP = 2
LARGE = 400_000


def ready() -> None:
    """All that takes long is done: the tracer may come, and the ranks begin at once."""
    if os.environ.get("TRACED"):
        os.kill(os.getpid(), signal.SIGSTOP)
    meeting = Path(os.environ["MEETING"])
    (meeting / sys.argv[2]).touch()
    while len(list(meeting.iterdir())) < int(sys.argv[3]):
        time.sleep(0.005)


def opened(root: str, rank: int, world_size: int, token: str) -> CheckpointStore:
    group = StorageGroup(rank, world_size, token) if world_size > 1 else None
    return open_store(
        root,
        group=group,
        retention=KeepLatest(1),
        grace_seconds=0,
        rank_timeout_seconds=float(os.environ["RANK_TIMEOUT_SECONDS"]),
    )


def state_of(step: int, rank: int) -> dict[str, Any]:
    """A small state with a tensor of its own on each rank, a shared one, and plain values."""
    import torch

    return {
        "own": torch.full((LARGE,), float(step * 10 + rank)),
        "shared": torch.arange(1000, dtype=torch.float32) + step,
        "values": {"step": step, "rank": rank, "name": "é"},
    }


def save_directory(store: CheckpointStore, rank: int, given: str) -> None:
    ready()
    store.save_directory(STEP, Path(given) / f"rank{rank}")


def save(store: CheckpointStore, rank: int, given: str) -> None:
    state = state_of(STEP, rank)
    import ckptstore.saving.save_state

    assert ckptstore.saving.save_state
    ready()
    store.save(STEP, state)


def save_async(store: CheckpointStore, rank: int, uploader: str) -> None:
    state = state_of(STEP, rank)
    import ckptstore.saving.save_state

    assert ckptstore.saving.save_state
    ready()
    store.save_async(STEP, state, uploader=uploader).result()


def import_file(store: CheckpointStore, given: str) -> None:
    from ckptstore.interchange.importing import import_state

    ready()
    import_state(Path(given) / "state.pt", store, STEP, kind="torch")


def copy(root: str, target: str) -> None:
    from ckptstore.interchange.copying import copy_store
    from ckptstore.transfer.opened import open_place

    with open_store(root) as store:
        place = open_place(target)
        ready()
        copy_store(store, place)
        place.close()


def cached(directory: str) -> None:
    """A checkpoint without paths of its own, as a directory on this node."""
    from ckptstore import Checkpoint

    path = Path(directory)
    options = {"path": str(path.parent), "target_protocol": "file"}
    checkpoint = Checkpoint.from_uri(f"dir://{path.name}", storage_options=options)
    ready()
    with checkpoint.as_directory() as path:
        assert sum(file.is_file() for file in path.rglob("*")) == len(checkpoint.files) + 1


def main(flow: str, rank: int, world_size: int, token: str, root: str, given: str) -> None:
    if flow == "cp":
        return copy(root, given)
    if flow == "node_cache":
        return cached(given)
    store = opened(root, rank, world_size, token)
    if flow == "save_directory":
        save_directory(store, rank, given)
    elif flow == "save":
        save(store, rank, given)
    elif flow.startswith("save_async_"):
        save_async(store, rank, flow.removeprefix("save_async_"))
    elif flow == "import":
        import_file(store, given)
    elif flow == "prune":
        ready()
        store.prune()
    elif flow == "gc":
        ready()
        store.collect_garbage(claim=True)
    store.close()
    return None


if __name__ == "__main__":
    try:
        main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
    except CkptstoreError as error:
        print(f"{type(error).__name__} committed={error.committed}: {error}")
    else:
        print("done")
