"""People at the command line change what is kept while jobs save: the log reaches every kind of record."""

from __future__ import annotations

import pytest
from kit.simulation import Simulation, report
from kit.simulation.plan import Action, Actor, Plan, Trouble, draw_commands, draw_following, draw_thinning
from kit.simulation.world import World

from ckptstore.format.changes import Commit, Noop

pytestmark = pytest.mark.slow

KINDS = {"Claim", "Commit", "Remove", "Pin", "Unpin", "Restore", "Annotate"}
"""All but `Resumed`, which jobs with a fast tier write, and `Noop`."""


def test_every_kind_of_change_is_met(simulation: Simulation) -> None:
    met: set[str] = set()
    for seed in range(50):
        worlds: list[World] = []
        outcome = simulation.run(draw_commands(seed), prepare=worlds.append)
        assert outcome.ok, report(outcome)
        met |= {type(record.change).__name__ for record in worlds[0].model.records.values()}
        if seed > 10 and met == KINDS:
            return
    raise AssertionError(f"only {met} were met")


def test_a_create_that_fails_for_as_long_as_it_is_tried_leaves_a_noop(simulation: Simulation) -> None:
    job = Actor("job1", tuple(Action("directory", step=step) for step in (10, 20, 30)))
    met: set[type] = set()
    for seed in range(10):
        worlds: list[World] = []
        trouble = Trouble("outage", "job1.0", at_call=20 + seed, seconds=0.5, what="lost log/")
        plan = Plan(seed, rank_timeout_seconds=12.0, retry_attempts=2, actors=(job,), troubles=(trouble,))
        assert simulation.run(plan, prepare=worlds.append).ok
        met |= {type(record.change) for record in worlds[0].model.records.values()}
    assert Noop in met


def test_checkpoints_are_thinned_while_jobs_save(simulation: Simulation) -> None:
    """The ledger of the simulation knows the rules by itself, and the model what every file must hold."""
    thinned = 0
    for seed in range(4):
        worlds: list[World] = []
        outcome = simulation.run(draw_thinning(seed), prepare=worlds.append)
        assert outcome.ok, report(outcome)
        changes = [record.change for record in worlds[0].model.records.values()]
        thinned += sum(isinstance(change, Commit) and change.thins is not None for change in changes)
    assert thinned >= 4


def test_followers_are_killed_and_go_on_while_jobs_save_and_people_remove(simulation: Simulation) -> None:
    """Each commit comes once and in order, and nothing is deleted while somebody works on it: the model checks it."""
    kills, again, named = 0, 0, 0
    for seed in range(5):
        worlds: list[World] = []
        outcome = simulation.run(draw_following(seed), prepare=worlds.append)
        assert outcome.ok, report(outcome)
        kills += sum("--- kill  of follower" in line for line in outcome.trace)
        (followed,) = worlds[0].model.followed.values()
        named += len(followed.named)
        works = sum(" works on record " in line for line in outcome.trace)
        again += works - len(followed.done)
    assert min(kills, again, named) > 0
