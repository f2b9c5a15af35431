"""What every test stands on: no configuration from outside, a cache of its own, the same examples each time."""

from __future__ import annotations

import gc
import os
import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "ckptstore", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("ckptstore")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in the background of a shell: children would ignore it too
    signal.signal(signal.SIGINT, signal.default_int_handler)

LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def pytest_collection_finish() -> None:
    """What thousands of collected tests consist of stays to the end: no garbage collection looks through it again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    for name in list(os.environ):
        if name.startswith("CKPTSTORE_") or name in LAUNCHER_VARIABLES:
            monkeypatch.delenv(name)
    monkeypatch.setenv("CKPTSTORE_CHECK_COPIES", "all")
    monkeypatch.setenv("CKPTSTORE_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def store_root(tmp_path: Path) -> Path:
    """A directory for a store; it does not exist yet."""
    return tmp_path / "store"
