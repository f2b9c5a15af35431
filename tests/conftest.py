"""What every test stands on: no configuration from outside, a cache of its own, the same examples each time."""

from __future__ import annotations

import gc
import os
import re
import signal
from itertools import count
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "ckptstore", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("ckptstore")

os.environ.setdefault("OMP_NUM_THREADS", "1")  # as a rank has: else the threads of several workers wait for each other

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in the background of a shell: children would ignore it too
    signal.signal(signal.SIGINT, signal.default_int_handler)

_numbers = count()

LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def pytest_collection_finish() -> None:
    """What thousands of collected tests consist of stays to the end: no garbage collection looks through it again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def _base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.getbasetemp()


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest, _base: Path) -> Path:
    """As pytest's own, which looks through the directories of all tests before for a number that is free."""
    path = _base / f"{re.sub(r'[^A-Za-z0-9_]', '_', request.node.name)[:30]}-{next(_numbers)}"
    path.mkdir(mode=0o700)
    return path


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch, _base: Path) -> None:
    for name in list(os.environ):
        if name.startswith("CKPTSTORE_") or name in LAUNCHER_VARIABLES:
            monkeypatch.delenv(name)
    monkeypatch.setenv("CKPTSTORE_CHECK_COPIES", "all")
    cache = _base / f"cache-{next(_numbers)}"
    cache.mkdir(mode=0o700)
    monkeypatch.setenv("CKPTSTORE_CACHE_DIR", str(cache))


@pytest.fixture
def store_root(tmp_path: Path) -> Path:
    """A directory for a store; it does not exist yet."""
    return tmp_path / "store"
