"""The same seed is the same run: in one process, in another one, whatever the seed of Python's hashes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from kit.simulation import Plan, Simulation, draw

from ckptstore.events import listeners
from ckptstore.upkeep import leases

pytestmark = pytest.mark.slow

TESTS = Path(__file__).parents[1]
SEEDS = range(700_000, 700_006)
PROGRAM = f"""
import sys
from kit.simulation import Simulation, draw
with Simulation() as simulation:
    filled = [value for value in simulation._state._real if hasattr(value, "__len__") and len(value)]
    before = set(sys.modules)
    for seed in range({SEEDS.start}, {SEEDS.stop}):
        print(simulation.run(draw(seed)).digest)
    later = [name for name in sorted(set(sys.modules) - before) if name.startswith(("ckptstore", "tenacity"))]
    assert not later, f"a first simulation does not patch {{later}}, and the next one does"
    assert not filled, f"a simulated process begins with empty containers, a real one with {{filled}}"
"""


def test_twice_in_one_process(simulation: Simulation) -> None:
    first = [simulation.run(draw(seed)).digest for seed in SEEDS]
    assert first == [simulation.run(draw(seed)).digest for seed in SEEDS]
    assert len(set(first)) == len(first)


def test_whatever_the_process_did_before(simulation: Simulation, monkeypatch: pytest.MonkeyPatch) -> None:
    here = [simulation.run(draw(seed)).digest for seed in SEEDS]
    monkeypatch.setattr(leases, "_renewer", threading.current_thread())
    monkeypatch.setattr(leases, "_held", {"a lease"})
    monkeypatch.setattr(listeners, "_listeners", [lambda event: None])
    with Simulation() as later:
        assert [later.run(draw(seed)).digest for seed in SEEDS] == here


def test_in_processes_with_other_hashes(simulation: Simulation) -> None:
    here = [simulation.run(draw(seed)).digest for seed in SEEDS]
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM], cwd=TESTS, env=environment, capture_output=True, text=True, check=True
        )
        assert done.stdout.split() == here


@pytest.mark.parametrize("seed", SEEDS)
def test_a_plan_is_text_and_back(seed: int) -> None:
    plan = draw(seed)
    assert Plan.from_json(plan.to_json()) == plan
