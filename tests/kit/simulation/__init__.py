"""Simulate jobs, readers and commands on one store, deterministically in virtual time. A seed decides who goes on at
each request, each lock and each wait, and the faults. Each promise is checked after every change.

    with Simulation() as simulation:
        outcome = simulation.run(draw(42))
        assert outcome.ok, report(outcome)

The same seed is the same run. `python -m kit.simulation` runs seeds too.
"""

from __future__ import annotations

from kit.simulation.ledger import Violation
from kit.simulation.plan import Action, Actor, Plan, Trouble, draw
from kit.simulation.simulator import Outcome, Simulation, report, shrink
from kit.simulation.virtual.scheduler import Deadlock, Stuck

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
