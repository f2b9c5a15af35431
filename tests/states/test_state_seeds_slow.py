"""Seeds of the bench of states: four thousand, ten times as many as the mistakes need that are planted into it, and in
CI as many as these need and no more."""

from __future__ import annotations

import pytest
from seed_runs import check


@pytest.mark.slow
def test_seeds_for_ci() -> None:
    check(range(12_000, 12_200))


@pytest.mark.long
@pytest.mark.parametrize("first", [10_000, 11_000, 12_000, 13_000])
def test_seeds(first: int) -> None:
    check(range(first, first + 1_000))
