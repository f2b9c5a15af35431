"""The soak, for seconds: that it works, that nothing breaks, and that it would see what it looks for."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest
from soak import MOST_GROWTH_BYTES, Soak, Watched
from soak_roles import promise, promised

pytestmark = pytest.mark.slow


@pytest.mark.timeout(900)
def test_some_seconds_of_use(tmp_path: Path) -> None:
    soak = Soak(tmp_path, 12.0, random.Random(1))
    wrong = soak.run()
    print(soak.table())
    assert not wrong
    assert all(soak.counts[f"commits on {place}"] for place in ("disk", "disk alone", "s3", "s3 alone"))


def test_growth_above_the_bounds_is_a_leak() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    steady = [(100 << 20, 10, 3)] * 50
    assert Watched("steady", process, samples=steady).leaks() == []
    growing = [((100 << 20) + number * MOST_GROWTH_BYTES // 20, 10 + number, 3) for number in range(50)]
    found = Watched("growing", process, samples=growing).leaks()
    assert [text.split(" ", 3)[3] for text in found] == [
        "bytes of memory more at the end",
        "descriptors more at the end",
    ]


def test_the_ledger_says_what_was_promised(tmp_path: Path) -> None:
    ledger = tmp_path / "ledger"
    assert promised(ledger) == 0
    promise(ledger, 3, 1)
    promise(ledger, 2, 9)
    assert promised(ledger) == 3
