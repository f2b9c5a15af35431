"""Runs what needs an accelerator in processes of its own, whose accelerator is the stand-in from the start.

Autograd counts devices at the first backward pass of a process, and everything else that runs in this one is about
machines without an accelerator. `pytest -p stand_in_plugin tests/accelerator/checks_save.py`, with this folder in
PYTHONPATH, runs one file alone.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from kit.accelerator import CannotBuild
from kit.accelerator.building import built_extension

HERE = Path(__file__).parent
DEVICE = HERE / "checks_device.py"
ROOT = HERE.parents[1]


@pytest.fixture(scope="module")
def extension() -> Path:
    """The stand-in is built; where it cannot be, its tests are skipped, which CI does not accept."""
    try:
        return built_extension()
    except CannotBuild as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))


def run_pytest(*arguments: str, **variables: str) -> None:
    """Run tests on the stand-in. What failed is shown."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "stand_in_plugin", "-p", "no:xdist", *arguments]
    paths = os.pathsep.join([str(HERE), str(HERE.parent), str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": paths, **variables}, capture_output=True, text=True
    )
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout[-6000:]}\n{done.stderr[-3000:]}"


@pytest.mark.long
@pytest.mark.usefixtures("extension")
def test_seeds_of_states() -> None:
    run_pytest(str(HERE / "checks_states.py"), STAND_IN_SEEDS="150")


SUITES = {"tests/state/test_optimizers.py": "standin:1", "tests/dcp/test_single.py": "standin:0"}
"""Tests that were written for the host, and the device where their tensors lie. Stock DCP waits for its copies on the
current device of a thread, which is the first one."""
DENSE = "not test_single or (not sparse and not quantized)"
"""The stand-in has dense tensors only."""


@pytest.mark.timeout(900)  # the stand-in may have to be built
@pytest.mark.usefixtures("extension")
def test_copies_from_a_device() -> None:
    run_pytest(str(DEVICE))


@pytest.mark.slow
@pytest.mark.timeout(900)  # of all; each has its own limit
@pytest.mark.usefixtures("extension")
def test_checks_and_other_suites() -> None:
    """In one process: to begin one takes longer than most of them do. First what draws the device's own numbers."""
    checks = sorted(str(path) for path in HERE.glob("checks_*.py") if path != DEVICE)
    defaults = [f"{Path(path).name}={device}" for path, device in SUITES.items()]
    run_pytest(*checks, *SUITES, "-k", DENSE, STAND_IN_DEFAULT=" ".join(defaults))


STATE_SUITES = ["cast", "flatten", "incremental", "modes", "modules", "nothing_silent", "values"]
"""Of tests/state those without ranks, which meet through gloo, on the host, and that read no memory by address."""


@pytest.mark.usefixtures("extension")
@pytest.mark.parametrize(
    "names",
    [
        pytest.param([*STATE_SUITES, "shared_memory", "wrapped_state"], marks=pytest.mark.slow, id="one state"),
        pytest.param(["any_state"], marks=pytest.mark.long, id="drawn states of several threads"),
    ],
)
def test_the_suites_of_states(names: list[str]) -> None:
    paths = [f"tests/state/test_{name}.py" for name in names]
    run_pytest(*paths, "-m", "not slow and not long", STAND_IN_DEFAULT="standin:0")
