"""Eight processes of one node open the same checkpoint in S3: what the server sends, and the time against one."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from s3_contest import ROOT, serving
from s3_worker import open_once
from told import CLOCK, tell
from versus import FULL, ROUNDS

from ckptstore import open_store
from ckptstore.testing import run_ranks

SIZE_BYTES = (1 << 30) if FULL else (16 << 20)


@pytest.mark.benchmark(timer=CLOCK)
def test_eight_processes(benchmark: Any, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for index in range(8):
        (source / f"shard-{index}.bin").write_bytes(os.urandom(1 << 20) * (SIZE_BYTES >> 23))
    with serving() as server:
        options = server.storage_options
        with open_store(ROOT, storage_options=options) as store:
            checkpoint = store.save_directory(1, source)
        fetched: list[float] = []
        samples: dict[str, list[float]] = {"eight processes": [], "one process": []}

        def run(num_processes: int) -> float:
            cache = tmp_path / "cache"
            shutil.rmtree(cache, ignore_errors=True)
            seen = len(server.ask("log"))
            seconds = run_ranks(
                num_processes,
                open_once,
                checkpoint.uri,
                options,
                time.time() + 3.0,
                env={"CKPTSTORE_CACHE_DIR": str(cache), "CKPTSTORE_DURABLE": "0"},
            )
            sent = sum(request["sent_bytes"] for request in server.ask("log")[seen:] if ".bin" in request["path"])
            if num_processes > 1:
                fetched.append(round(sent / SIZE_BYTES, 3))
            return max(seconds)

        for _ in range(ROUNDS):
            samples["eight processes"].append(run(8))
            samples["one process"].append(run(1))
    wall = [round(many / one, 3) for many, one in zip(*samples.values(), strict=True)]
    tell(benchmark, samples, size_bytes=SIZE_BYTES, bytes_fetched_over_needed=fetched, wall_over_one=wall)
    assert all(share == 1.0 for share in fetched)
