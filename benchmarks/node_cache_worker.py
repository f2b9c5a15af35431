"""What each process of the node-cache benchmark does."""

from __future__ import annotations

import time
from typing import Any

from ckptstore import open_store
from ckptstore.bench.no_paths import NoPaths
from ckptstore.checkpoint import Checkpoint
from ckptstore.loading.story import CheckpointFiles
from ckptstore.testing import CountCalls, wrap
from ckptstore.transfer import Transfer


def open_once(directory: str, start_at: float) -> tuple[float, int]:
    """Open the checkpoint at the given time; seconds until it is there, and bytes that this process fetched."""
    counted = CountCalls()
    config = open_store("memory://config")._job.config
    storage: Any = wrap(NoPaths(directory), counted)  # type: ignore[arg-type]
    transfer = Transfer(storage, config=config.transfer, retry=config.retry)
    checkpoint = Checkpoint(CheckpointFiles(storage=storage, transfer=transfer, config=config, prefix="", record=None))
    time.sleep(max(0.0, start_at - time.time()))
    started = time.perf_counter()
    with checkpoint.as_directory():
        seconds = time.perf_counter() - started
    return seconds, counted.size_bytes["read_into"]
