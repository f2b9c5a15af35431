"""One simulation for all tests of a process: to patch everything takes longer than a run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from kit.simulation import Simulation


@pytest.fixture(scope="module")
def simulation() -> Iterator[Simulation]:
    with Simulation() as simulation:
        yield simulation
