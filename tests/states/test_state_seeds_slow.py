"""Four thousand seeds of the bench of states, ten times as many as the mistakes need that are planted into it."""

from __future__ import annotations

import pytest
from seed_runs import check

LONG = [pytest.param(first, marks=pytest.mark.long) for first in (10_000, 11_000, 13_000)]


@pytest.mark.parametrize("first", [*LONG, pytest.param(12_000, marks=pytest.mark.slow)])
def test_seeds(first: int) -> None:
    check(range(first, first + 1_000))
