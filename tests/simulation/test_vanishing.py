"""A store, or a part of it, is lost under a job: no save that begins later may succeed."""

from __future__ import annotations

import pytest
from kit.simulation import Simulation
from kit.simulation.plan import draw_vanishing

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("first", range(0, 24, 8))
def test_saves_into_what_is_gone_fail(simulation: Simulation, first: int) -> None:
    num_lost = 0
    for seed in range(first, first + 8):
        outcome = simulation.run(draw_vanishing(seed))
        assert outcome.ok, f"seed {seed}: {outcome.failure}"
        num_lost += any("--- vanish" in line for line in outcome.trace)
    assert num_lost >= 4
