"""Several ranks as threads of one process, each with a store of its own: quick, for flows that need no real process."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from uuid import uuid4

from ckptstore import CheckpointStore, StorageGroup, open_store


def run_ranks_in_threads(
    world_size: int, root: Path, flow: Callable[[CheckpointStore, int], Any], **keywords: Any
) -> list[Any]:
    """Call `flow(store, rank)` on every rank at once; what a rank raises is its result."""
    token = uuid4().hex

    def run(rank: int) -> Any:
        group = StorageGroup(rank, world_size, token)
        with open_store(str(root), group=group, **{"rank_timeout_seconds": 30, **keywords}) as store:
            try:
                return flow(store, rank)
            except Exception as error:
                return error

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(run, range(world_size)))


def make_tree(directory: Path, files: dict[str, bytes]) -> Path:
    """A directory with these files."""
    for name, data in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def read_tree(directory: Path) -> dict[str, bytes]:
    """All files below a directory but those of the format itself."""
    reserved = {"ckptstore.json", "user-metadata.json"}
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.name not in reserved
    }
