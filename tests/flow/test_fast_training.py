"""A training that is sharded over two nodes loses one of them with its disk, and goes on as if nothing had happened."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from fast_worker import train
from forked_ranks import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_a_lost_node_costs_no_step(tmp_path: Path) -> None:
    whole = run_ranks(2, train, str(tmp_path / "whole"), 6, "well")
    root = tmp_path / "lost"
    before = run_ranks(2, train, str(root), 3, "preempted")
    shutil.rmtree(root / "node1")
    after = run_ranks(2, train, str(root), 3, "well")
    for rank in range(2):
        assert before[rank][0] is None
        assert after[rank][:2] == (3, False), "from the copy on the partner, which the store does not have"
        assert before[rank][2] + after[rank][2] == whole[rank][2]
