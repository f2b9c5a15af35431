"""Seeds 50 to 299, and before a release to 799."""

from __future__ import annotations

import pytest
from kit.simulation import Simulation
from seed_items import items, run_seeds

pytestmark = pytest.mark.slow


@items(50, 250)
def test_every_promise_holds(simulation: Simulation, first: int) -> None:
    run_seeds(simulation, first)


@pytest.mark.long
@items(300, 500)
def test_every_promise_holds_for_more_seeds(simulation: Simulation, first: int) -> None:
    run_seeds(simulation, first)
