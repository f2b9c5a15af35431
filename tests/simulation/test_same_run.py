"""The same seed is the same run: in one process, in another one, whatever the seed of Python's hashes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from ckptstore.testing.simulation import Plan, Simulation, draw

SEEDS = range(700_000, 700_006)
PROGRAM = f"""
from ckptstore.testing.simulation import Simulation, draw
with Simulation() as simulation:
    for seed in range({SEEDS.start}, {SEEDS.stop}):
        print(simulation.run(draw(seed)).digest)
"""


def test_twice_in_one_process(simulation: Simulation) -> None:
    first = [simulation.run(draw(seed)).digest for seed in SEEDS]
    assert first == [simulation.run(draw(seed)).digest for seed in SEEDS]
    assert len(set(first)) == len(first)


def test_in_processes_with_other_hashes(simulation: Simulation) -> None:
    here = [simulation.run(draw(seed)).digest for seed in SEEDS]
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True
        )
        assert done.stdout.split() == here


@pytest.mark.parametrize("seed", SEEDS)
def test_a_plan_is_text_and_back(seed: int) -> None:
    plan = draw(seed)
    assert Plan.from_json(plan.to_json()) == plan
