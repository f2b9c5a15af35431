"""Eight processes of one node open the same checkpoint on a storage that is not a disk: bytes fetched, and the time."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

from node_cache_worker import open_once
from versus import FULL, ROUNDS

from ckptstore import open_store
from ckptstore.testing import run_ranks

SIZE_BYTES = (1 << 30) if FULL else (16 << 20)


def test_eight_processes(benchmark: Any, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for index in range(8):
        (source / f"shard-{index}.bin").write_bytes(os.urandom(1 << 20) * (SIZE_BYTES >> 23))
    with open_store(tmp_path / "store") as store:
        checkpoint = store.save_directory(1, source)
    fetched: list[float] = []
    alone: list[float] = []
    together: list[float] = []

    def run(num_processes: int) -> tuple[float, int]:
        cache = tmp_path / "cache"
        shutil.rmtree(cache, ignore_errors=True)
        seen = run_ranks(
            num_processes, open_once, checkpoint.uri, time.time() + 2.0, env={"CKPTSTORE_CACHE_DIR": str(cache)}
        )
        return max(seconds for seconds, _ in seen), sum(size_bytes for _, size_bytes in seen)

    def eight() -> None:
        seconds, size_bytes = run(8)
        together.append(seconds)
        fetched.append(size_bytes / checkpoint.size_bytes)

    benchmark.pedantic(eight, setup=lambda: alone.append(run(1)[0]), rounds=ROUNDS)
    benchmark.extra_info.update(
        size_bytes=SIZE_BYTES,
        bytes_fetched_over_needed=fetched,
        one_process_seconds=alone,
        eight_processes_seconds=together,
        wall_over_one=[round(many / one, 3) for many, one in zip(together, alone, strict=True)],
    )
    assert all(share < 1.01 for share in fetched)
