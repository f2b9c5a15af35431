"""Seeds of the bench of states on two ranks and on four."""

from __future__ import annotations

import pytest
from seed_runs import check


# Two ranks have sixty seeds in the quick tests.
@pytest.mark.parametrize(
    ("num_ranks", "count"),
    [pytest.param(4, 12, marks=pytest.mark.slow), *(pytest.param(n, 120, marks=pytest.mark.long) for n in (2, 4))],
)
def test_seeds_on_several_ranks(num_ranks: int, count: int) -> None:
    check(range(1_000, 1_000 + count), num_ranks=num_ranks)
