"""What a commit costs the leader as ranks grow, when they talk through the storage and nothing else.

The leader is real, the others are simulated: see `ckptstore.bench.workloads.simulated`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from told import CLOCK, tell
from versus import FULL, ROUNDS

from ckptstore.bench.workloads.simulated import commit_of
from ckptstore.testing import run_ranks

NUM_RANKS = [64, 256, 1024] if FULL else [8, 16]


@pytest.mark.benchmark(timer=CLOCK)
@pytest.mark.parametrize("world_size", NUM_RANKS)
def test_commit(benchmark: Any, tmp_path: Path, world_size: int) -> None:
    found = [run_ranks(1, commit_of, str(tmp_path / "run"), world_size, 0.0)[0] for _ in range(ROUNDS)]
    middle = sorted(found, key=lambda one: one["seconds"])[len(found) // 2]
    facts = {name: value for name, value in middle.items() if name != "seconds"}
    tell(benchmark, {"ckptstore": [one["seconds"] for one in found]}, **facts)
