"""What the tests with Ray share: one cluster of two nodes per process. Without Ray they are skipped with a reason."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="Ray is not installed")

sys.path.insert(0, str(Path(__file__).parent))  # workers find training functions by the names of these modules

from cluster import RayCluster, started_cluster

from ckptstore.testing.s3_server import S3Server, s3_server


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """End the process of a test that takes too long: a driver that waits for Ray hears no signal."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            given = item.get_closest_marker("timeout")
            seconds = given.args[0] if given else float(item.config.getini("timeout"))
            item.add_marker(pytest.mark.timeout(seconds, method="thread"), append=False)


@pytest.fixture(scope="session")
def nodes() -> Iterator[RayCluster]:
    """Two nodes with four logical CPUs each, for all modules that this process runs."""
    with started_cluster() as running:
        yield running


@pytest.fixture(scope="module")
def cluster(nodes: RayCluster) -> Iterator[RayCluster]:
    """A connection for this module. What it leaves running ends with it; modules without one are outside of Ray."""
    with nodes.connected():
        yield nodes


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    """A server that the whole cluster reaches."""
    with s3_server(buckets=["test"]) as server:
        yield server
