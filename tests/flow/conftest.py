"""What several tests of the fast tier stand on and listen to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from small_disks import mounted

from ckptstore.events import CheckpointSkipped, listening

if TYPE_CHECKING:
    from fast_jobs import Jobs


@pytest.fixture
def jobs(tmp_path: Path) -> Jobs:
    """Jobs on nodes whose disks are directories below one."""
    from fast_jobs import Jobs  # with torch, which other tests do without

    return Jobs(tmp_path)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """The disk of node a."""
    with mounted(tmp_path / "disk-a", "2m") as place:
        yield place


@pytest.fixture
def skipped() -> Iterator[list[str]]:
    """The reasons why checkpoints are passed over."""
    reasons: list[str] = []
    with listening(lambda event: reasons.append(event.reason), CheckpointSkipped):
        yield reasons
