"""A sample of the sweep: SIGKILL at system calls that change the disk, spread over each flow. `make soak` has all."""

from __future__ import annotations

from pathlib import Path

import pytest
from sweep import FLOWS, NotTraced, sweep

MOST = {"save_directory": 16, "cp": 8, "node_cache": 6}
"""How many kills in a flow; the others get three, for most of them load torch twice."""


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("flow", FLOWS)
def test_kills_spread_over_the_flow(flow: str, tmp_path: Path) -> None:
    try:
        swept = sweep(flow, tmp_path, most=MOST.get(flow, 3))
    except NotTraced as error:
        pytest.skip(f"ptrace is not allowed: {error}")
    assert swept.problems == []
    assert swept.num_tried >= 3
    assert swept.num_points >= 10
