"""Puts what other tests of states share in reach."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "state"))

import pytest


@pytest.fixture(autouse=True)
def _quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here is about what a loss of power leaves."""
    monkeypatch.setenv("CKPTSTORE_DURABLE", "false")
