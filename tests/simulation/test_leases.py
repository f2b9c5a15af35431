"""A lease is given back, unless the disk refuses to delete it."""

from __future__ import annotations

import pytest
from kit.simulation import Simulation, draw, report

from ckptstore.upkeep import leases

pytestmark = pytest.mark.slow

SEED = 888016
"""On a disk that fails to delete a lease, once."""


def test_a_lease_that_the_disk_would_not_delete_breaks_no_promise(simulation: Simulation) -> None:
    outcome = simulation.run(draw(SEED))
    assert outcome.ok, report(outcome)


def test_one_that_nobody_deletes_does(simulation: Simulation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases._Lease, "give_back", lambda lease: None)
    assert "close leaves no lease" in report(simulation.run(draw(SEED)))
