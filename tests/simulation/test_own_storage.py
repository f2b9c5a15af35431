"""A storage that the simulation does not know is judged by what it holds."""

from __future__ import annotations

from dict_storage import DictStorage, Forgets
from kit.simulation import Action, Actor, Plan, Simulation, report
from seed_items import broken_rule

SAVES = tuple(Action("directory", step=step) for step in (10, 20))
JOBS = tuple(Actor(f"job{number}", SAVES) for number in (1, 2, 3))


def test_one_that_keeps_its_promises() -> None:
    with Simulation(DictStorage, modules=["dict_storage"], states=False) as simulation:
        for seed in range(5):
            job = Actor("job1", (*SAVES, Action("close")), ranks=2)
            plan = Plan(seed, error_rate=0.02, late_rate=0.5, retry_attempts=25, actors=(job,))
            outcome = simulation.run(plan)
            assert outcome.ok, report(outcome)
            outcome = simulation.run(Plan(seed, actors=JOBS))
            assert outcome.ok, report(outcome)


def test_one_that_does_not() -> None:
    with Simulation(Forgets, modules=["dict_storage"], states=False) as simulation:
        rules = {broken_rule(simulation.run(Plan(seed, actors=JOBS))) for seed in range(5)}
    assert rules & {"a record never changes", "records have no gaps", "records are a chain"}
