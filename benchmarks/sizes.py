"""The sizes of the cases, their rounds, and the clock that times their turns.

No case fails for being slow. `CKPTSTORE_BENCH=full`, which `make bench` sets, takes the real sizes; else they are small
and only show that the cases run.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

from ckptstore.tools.bench.figures.report import WorkloadOutcome

Take = Callable[..., WorkloadOutcome]
"""The fixture `take`."""

FULL = os.environ.get("CKPTSTORE_BENCH") == "full"
_ROUNDS = os.environ.get("CKPTSTORE_BENCH_ROUNDS", None if FULL else "1")
ROUNDS = int(_ROUNDS or 7)


_turns = [0.0]


def turn_clock() -> float:
    """A clock for `pytest-benchmark` that goes on only while what is timed in a turn lasts, on the slowest rank."""
    return _turns[0]


def count(seconds: float) -> None:
    """Let the clock go on."""
    _turns[0] += seconds


def group(name: str) -> pytest.MarkDecorator:
    """Mark the cases of one table."""
    return pytest.mark.benchmark(group=name, timer=turn_clock)


def turns(rounds: int = ROUNDS) -> list[Any]:
    """Parameters for the argument `turn`: so many rounds, or as many as the environment says."""
    return [pytest.param(number, id=f"turn{number}") for number in range(int(_ROUNDS or rounds))]
