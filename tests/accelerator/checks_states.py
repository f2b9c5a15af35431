"""The bench of states, with all modules and tensors on the stand-in."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from kit import accelerator

sys.path.append(str(Path(__file__).parents[1] / "states"))
from seed_runs import check

COUNT = int(os.environ.get("STAND_IN_SEEDS", "15"))


@pytest.mark.parametrize("device", range(accelerator.DEVICE_COUNT))
def test_seeds(device: int) -> None:
    accelerator.draw_from_host()  # two programs draw the same numbers
    check(range(device * COUNT, (device + 1) * COUNT), device=f"{accelerator.NAME}:{device}")
