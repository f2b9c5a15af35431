"""A deterministic simulation: jobs, readers and commands work on one store in virtual time, while a seed decides who
goes on at each request, each lock and each wait, and what goes wrong. Each promise is checked after every change.

    with Simulation() as simulation:
        outcome = simulation.run(draw(42))
        assert outcome.ok, report(outcome)

The same seed is the same run. `python -m ckptstore.testing.simulation` runs seeds too.
"""

from __future__ import annotations

from ckptstore.testing.simulation.model import Violation
from ckptstore.testing.simulation.plan import Action, Actor, Plan, Trouble, draw
from ckptstore.testing.simulation.simulator import Outcome, Simulation, report, shrink
from ckptstore.testing.simulation.virtual.scheduler import Deadlock, Stuck

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
