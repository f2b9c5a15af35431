"""Ranks that save through the store itself, and wait before each write of step 2 until the test lets them go on."""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path
from typing import Any

from ckptstore import StorageGroup, open_store
from ckptstore.testing.faults import Call, wrap
from ckptstore.transfer import opened

WAIT_SECONDS = 240.0


class Gate:
    """The nth write to a file of step 2 waits for the file `gate-n`."""

    def __init__(self, gates: Path) -> None:
        self.gates, self.numbers = gates, itertools.count(1)

    def __call__(self, call: Call) -> None:
        is_data = "/step-0000000002-" in call.key and "/data-" in call.key
        if call.phase == "before" and call.verb in ("write", "write_part", "write_many") and is_data:
            wait_for(self.gates / f"gate-{next(self.numbers)}")


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} never came"
        time.sleep(0.01)


def save_two(store: str, gates: Path, options: dict[str, Any] | None, num_files: int, file_bytes: int) -> None:
    """Save step 1 at once, and step 2 as slowly as the gates say."""
    rank, real = int(os.environ["RANK"]), opened.open_storage
    opened.open_storage = lambda *given, **more: wrap(real(*given, **more), Gate(gates))
    source = gates / f"source-{rank}"
    source.mkdir(parents=True)
    for number in range(num_files):
        (source / f"data-{rank}-{number}").write_bytes(bytes([1 + rank]) * file_bytes)
    group = StorageGroup(rank=rank, world_size=int(os.environ["WORLD_SIZE"]), start_token="watched")
    with open_store(store, group=group, storage_options=options) as saved:
        saved.save_directory(1, source, metrics={"loss": 0.5})
        saved.save_directory(2, source, metrics={"loss": 0.25})
