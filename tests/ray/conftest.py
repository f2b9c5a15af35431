"""What the tests with Ray share: one cluster of two nodes per module. Without Ray they are skipped with a reason."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install ckptstore[ray]")

sys.path.insert(0, str(Path(__file__).parent))  # workers find training functions by the names of these modules

from cluster import RayCluster, ray_cluster


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    """Two nodes with four logical CPUs each."""
    with ray_cluster() as running:
        yield running
