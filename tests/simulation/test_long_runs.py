"""Runs of fifty thousand steps: one store for weeks, with one job after another."""

from __future__ import annotations

import pytest

from ckptstore.testing.simulation import Simulation, draw, report

STEPS = 50_000


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_fifty_thousand_steps(simulation: Simulation) -> None:
    done, seed = 0, 1_000_000
    while done < STEPS:
        outcome = simulation.run(draw(seed, num_jobs=12))
        assert outcome.ok, report(outcome)
        done, seed = done + outcome.requests, seed + 1
