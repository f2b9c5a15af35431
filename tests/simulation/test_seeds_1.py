"""The first seeds, for every run."""

from __future__ import annotations

from kit.simulation import Simulation
from seed_items import items, run_seeds


@items(0, 50)
def test_every_promise_holds(simulation: Simulation, first: int) -> None:
    run_seeds(simulation, first)
