"""Runs of many thousand steps: one store for weeks, with one job after another."""

from __future__ import annotations

import pytest
from kit.simulation import Simulation, draw, report


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "num_steps", [pytest.param(15_000, marks=pytest.mark.slow), pytest.param(100_000, marks=pytest.mark.long)]
)
def test_thousands_of_steps(simulation: Simulation, num_steps: int) -> None:
    done, seed = 0, 1_000_000
    while done < num_steps:
        outcome = simulation.run(draw(seed, num_jobs=12))
        assert outcome.ok, report(outcome)
        done, seed = done + outcome.requests, seed + 1
