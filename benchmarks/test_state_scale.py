"""What the leader of many ranks does after all have stored: joining the index, the manifest and the record.

The ranks are simulated by what they would have sent and stored; the leader is real.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from scale_worker import join_and_commit
from told import CLOCK, tell
from versus import FULL, ROUNDS

from ckptstore.testing import run_ranks

NUM_RANKS = [64, 256, 1024] if FULL else [4, 16]
NUM_TENSORS = 1000 if FULL else 100


@pytest.mark.benchmark(timer=CLOCK)
@pytest.mark.parametrize("num_ranks", NUM_RANKS)
def test_many_ranks(benchmark: Any, tmp_path: Path, num_ranks: int) -> None:
    found = []
    for number in range(ROUNDS):
        root = tmp_path / str(number)
        found += run_ranks(1, join_and_commit, str(root), num_ranks, NUM_TENSORS, timeout_seconds=600)
        shutil.rmtree(root)
    middle = sorted(found, key=lambda one: one["seconds"])[len(found) // 2]
    tell(
        benchmark,
        {"ckptstore": [one["seconds"] for one in found]},
        ranks=num_ranks,
        tensors=NUM_TENSORS,
        **{name: value for name, value in middle.items() if name != "seconds"},
    )
