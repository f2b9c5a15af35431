"""Simulate jobs, readers and commands on one store, deterministically in virtual time. A seed decides who goes on at
each request, each lock and each wait, and the faults. Each promise is checked after every change.

    with Simulation() as simulation:
        outcome = simulation.run(draw(42))
        assert outcome.ok, report(outcome)

The same seed is the same run. `python -m ckptstore.testing.simulation` runs seeds too.
"""

from __future__ import annotations

from ckptstore.runtime.extras import needs

needs("torch")

from ckptstore.testing.simulation.ledger import Violation  # noqa: E402
from ckptstore.testing.simulation.plan import Action, Actor, Plan, Trouble, draw  # noqa: E402
from ckptstore.testing.simulation.simulator import Outcome, Simulation, report, shrink  # noqa: E402
from ckptstore.testing.simulation.virtual.scheduler import Deadlock, Stuck  # noqa: E402

__all__ = [
    "Action",
    "Actor",
    "Deadlock",
    "Outcome",
    "Plan",
    "Simulation",
    "Stuck",
    "Trouble",
    "Violation",
    "draw",
    "report",
    "shrink",
]
