"""The cases of two and four ranks: for each number of ranks one set of processes runs them all."""

from __future__ import annotations

from pathlib import Path

import cases_ranks  # noqa: F401 - enters its cases
import pytest
from forked_ranks import run_ranks
from trials import CASES, problems, ranks_run

pytestmark = pytest.mark.slow


def check_all(ranks: int, root: Path) -> None:
    names = [name for name, one in CASES.items() if one.ranks == ranks]
    env = {"CKPTSTORE_DURABLE": "false"}
    seen = run_ranks(ranks, ranks_run, names, str(root), timeout_seconds=280, env=env)
    wrong = {
        f"{name}, rank {rank}": found
        for name in names
        for rank, one in enumerate(seen)
        if (found := problems(CASES[name], one[name]))
    }
    assert not wrong, wrong


def test_two_ranks_do_what_stock_does_or_refuse(tmp_path: Path) -> None:
    check_all(2, tmp_path)


@pytest.mark.long
def test_four_ranks_do_what_stock_does_or_refuse(tmp_path: Path) -> None:
    check_all(4, tmp_path)
