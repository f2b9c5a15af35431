"""A sample of the sweep: SIGKILL at system calls that change the disk, spread over each flow. `make soak` has all."""

from __future__ import annotations

from pathlib import Path

import pytest
from sweep import FLOWS, STATES, NotTraced, sweep

pytestmark = pytest.mark.slow

MOST = {"save_directory": 8, "prune": 6, "node_cache": 6, "cp": 6}
"""How many kills in a flow; the others get four."""


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "flow", [pytest.param(flow, marks=[pytest.mark.slow] if flow in STATES else []) for flow in FLOWS]
)
def test_kills_spread_over_the_flow(flow: str, tmp_path: Path) -> None:
    try:
        swept = sweep(flow, tmp_path, most=MOST.get(flow, 4))
    except NotTraced as error:
        pytest.skip(f"ptrace is not allowed: {error}")
    assert swept.problems == []
    assert swept.num_tried >= 3
    assert swept.num_points >= 10
