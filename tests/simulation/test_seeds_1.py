"""Seeds 0 to 149. Two files, because tests are dealt to processes by file."""

from __future__ import annotations

from seed_items import items, run_seeds

from ckptstore.testing.simulation import Simulation


@items(0, 150)
def test_every_promise_holds(simulation: Simulation, first: int) -> None:
    run_seeds(simulation, first)
