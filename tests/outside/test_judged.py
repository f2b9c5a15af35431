"""A sample of what ckpt-chaos says of training loops; `python tests/outside/judge.py` has all, and their table."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from judge import TARGETS, judge, verdicts

BY_NAME = {target.name: target for target in TARGETS}


def judged(name: str, work: Path, *, most: int) -> Counter[str]:
    judge(BY_NAME[name], work, most=most, jobs=2)
    return verdicts(work)


@pytest.mark.long
def test_a_loop_is_resumed_wherever_it_was_ended(tmp_path: Path) -> None:
    found = judged("loop: ckptstore", tmp_path / "runs", most=12)
    assert found.keys() == {"PASS"}
    assert found.total() > 6


@pytest.mark.long
def test_the_judge_condemns(tmp_path: Path) -> None:
    assert judged("loop: torch's DCP", tmp_path / "runs", most=8)["HARD_FAIL"]
