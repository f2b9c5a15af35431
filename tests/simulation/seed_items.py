"""What the files beside this one share: seeds in items of fifty, so that one that fails is soon found."""

from __future__ import annotations

import pytest
from kit.simulation import Outcome, Simulation, draw, report

SEEDS_AT_ONCE = 50


def items(first: int, count: int) -> pytest.MarkDecorator:
    """A parameter `first` for each fifty of so many seeds."""
    return pytest.mark.parametrize("first", range(first, first + count, SEEDS_AT_ONCE))


def run_seeds(simulation: Simulation, first: int) -> None:
    """Fail with the trace of the first seed that breaks a promise."""
    for seed in range(first, first + SEEDS_AT_ONCE):
        outcome = simulation.run(draw(seed))
        assert outcome.ok, report(outcome)


def broken_rule(outcome: Outcome) -> str:
    """The promise that a run broke, "" if it broke none; an error of the simulation or of a planted mistake fails."""
    assert outcome.ok or outcome.failure.startswith(("Violation: ", "Deadlock: ", "Stuck: ")), report(outcome)
    assert not any(error in outcome.failure for error in ("TypeError", "AttributeError")), report(outcome)
    return outcome.rule
