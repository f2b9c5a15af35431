"""What an asynchronous save costs the training: the stall of the call, and slower steps while the upload runs."""

from __future__ import annotations

import shutil
import statistics
from pathlib import Path
from typing import Any

import pytest
from async_worker import slowdowns, stalls
from states import STATES
from told import CLOCK, tell
from versus import FULL, ROUNDS

from ckptstore.testing import run_ranks


@pytest.mark.benchmark(timer=CLOCK)
@pytest.mark.parametrize("shape", list(STATES) if FULL else ["even"])
def test_stall(benchmark: Any, tmp_path: Path, shape: str) -> None:
    """Seconds until the call returns. The first call of a store comes after `warm_up`; DCP has nothing like that."""
    found = run_ranks(1, stalls, str(tmp_path / "out"), shape, ROUNDS, timeout_seconds=1800)[0]
    first = {name: round(statistics.median(samples), 4) for name, samples in found["first"].items()}
    copied = statistics.median(found["later"]["memcpy, 1 threads"])
    tell(
        benchmark,
        found["later"],
        size_bytes=found["size_bytes"],
        first_call_seconds=first,
        steady_over_memcpy=round(statistics.median(found["later"]["ckptstore, thread"]) / copied, 3),
        first_over_memcpy=round(first["ckptstore, thread"] / copied, 3),
    )
    shutil.rmtree(tmp_path / "out")


@pytest.mark.benchmark(timer=CLOCK)
def test_slowdown(benchmark: Any, tmp_path: Path) -> None:
    """Seconds that steps take longer, in sum, while one save is uploaded."""
    found = run_ranks(1, slowdowns, str(tmp_path / "out"), "even", ROUNDS, timeout_seconds=1800)[0]
    tell(
        benchmark,
        found["cost"],
        size_bytes=found["size_bytes"],
        step_over_step_alone=found["step_over_step_alone"],
    )
    shutil.rmtree(tmp_path / "out")
