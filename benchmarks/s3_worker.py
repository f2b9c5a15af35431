"""What each process of the benchmark of one node does."""

from __future__ import annotations

import time
from typing import Any

from ckptstore import Checkpoint


def open_once(uri: str, storage_options: dict[str, Any], start_at: float) -> float:
    """Open the checkpoint at the given time; seconds until it is there."""
    checkpoint = Checkpoint.from_uri(uri, storage_options=storage_options)
    time.sleep(max(0.0, start_at - time.time()))
    started = time.perf_counter()
    with checkpoint.as_directory():
        return time.perf_counter() - started
