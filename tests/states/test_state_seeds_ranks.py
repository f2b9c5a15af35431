"""Seeds of the bench of states on two ranks and on four."""

from __future__ import annotations

import pytest
from seed_runs import check


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "count"), [(2, 120), (4, 40)])
def test_seeds_on_several_ranks(num_ranks: int, count: int) -> None:
    check(range(1_000, 1_000 + count), num_ranks=num_ranks)
