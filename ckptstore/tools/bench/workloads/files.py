"""Create the directories of files to save."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ckptstore.tools.bench.work import Task

_LARGE_FILES = 4
_SMALL_BYTES = 10 << 10


@contextmanager
def files_of(task: Task, num_files: int | None = None) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Create the directories to save: one for each rank, or for "node-cache" one for all.

    They have large files or, for the shape "files", many of 10 KiB, or `num_files` in all.
    """
    shares = 1 if task.name == "node-cache" else task.options.ranks
    if num_files is None:
        is_small = task.options.shape == "files"
        num_files = max(1, task.size_bytes // _SMALL_BYTES) if is_small else _LARGE_FILES * shares
    each = max(1, num_files // shares)
    file_bytes = max(1, task.size_bytes // (each * shares))
    above = task.place.path if task.place.is_local else None
    with tempfile.TemporaryDirectory(prefix="ckptstore-bench-files-", dir=above) as directory:
        pattern = os.urandom(min(1 << 20, file_bytes))
        for rank in range(shares):
            target = Path(directory) / "source" / (f"rank-{rank}" if task.name == "directory" else "")
            for number in range(each):
                path = target / f"d{number // 1000}" / f"shard-{rank}-{number}.bin"
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("wb") as file:
                    for start in range(0, file_bytes, len(pattern)):
                        file.write(pattern[: file_bytes - start])
        os.sync()
        yield Path(directory) / "source", {"files": each * shares, "file_bytes": file_bytes}
