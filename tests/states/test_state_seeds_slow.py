"""Four thousand seeds of the bench of states, ten times as many as the mistakes need that are planted into it."""

from __future__ import annotations

import pytest
from seed_runs import check


@pytest.mark.slow
@pytest.mark.parametrize("first", range(10_000, 14_000, 1_000))
def test_seeds(first: int) -> None:
    check(range(first, first + 1_000))
