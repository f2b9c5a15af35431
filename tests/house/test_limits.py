"""The house only becomes simpler: a figure that gets worse is a failure, and one that got better becomes the limit."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from figures import AT_LEAST, LIMITS, ROOT, worse

HINT = "`PYTHONPATH=tests python tests/house/figures.py`"


@pytest.mark.slow
def test_no_figure_is_worse_than_its_limit() -> None:
    """What a change adds, it takes away elsewhere. One that is better by more than a hundredth is written down."""
    limits = json.loads(LIMITS.read_text())
    environment = {name: value for name, value in os.environ.items() if not name.startswith("CKPTSTORE_")}
    done = subprocess.run(
        [sys.executable, "tests/house/figures.py", "--json"],  # where no other test has warmed anything
        cwd=ROOT,
        env=environment | {"PYTHONPATH": "tests"},
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, int] = json.loads(done.stdout)
    assert found.keys() == limits.keys(), HINT
    assert worse(found, limits) == [], f"take something away; {HINT} has all of them"
    noted = {name: limit * (1.01 if name in AT_LEAST else 0.99) for name, limit in limits.items()}
    better = [name for name, value in found.items() if worse({name: round(noted[name])}, {name: value})]
    assert better == [], f"{HINT} --write notes what became better"


def test_what_is_worse() -> None:
    limits = {"lines of the core": 10, "lines of comments of the core": 5}
    assert worse(limits, limits) == []
    assert worse({"lines of the core": 9, "lines of comments of the core": 6}, limits) == []
    assert len(worse({"lines of the core": 11, "lines of comments of the core": 4}, limits)) == 2
