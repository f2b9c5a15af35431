"""The cases of one process."""

from __future__ import annotations

import warnings
from pathlib import Path

import cases_single  # noqa: F401 - enters its cases
import pytest
from trials import CASES, problems, run_case

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("name", [name for name, one in CASES.items() if one.ranks == 1])
def test_ours_does_what_stock_does_or_refuses(name: str, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert problems(CASES[name], run_case(CASES[name], tmp_path)) == []
