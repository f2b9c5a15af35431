"""Ten thousand seeds of the bench of states; another file has as many, for another process of the tests."""

from __future__ import annotations

import pytest
from seed_runs import check


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1 * 10_000, 2 * 10_000, 2_500))
def test_seeds(first: int) -> None:
    check(range(first, first + 2_500))
