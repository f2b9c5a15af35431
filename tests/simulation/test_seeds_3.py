"""Seeds 1000 to 1499. Four files, because tests are dealt to processes by file."""

from __future__ import annotations

from seed_items import items, run_seeds

from ckptstore.testing.simulation import Simulation


@items(1000, 500)
def test_every_promise_holds(simulation: Simulation, first: int) -> None:
    run_seeds(simulation, first)
