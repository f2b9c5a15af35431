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
MARKS = ("slow", "long", "ceph")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Pass over files that do not speak of the one mark that is asked for: each worker would import them for half a
    minute of a processor, to run nothing of them."""
    asked = re.fullmatch(rf"({'|'.join(MARKS)})( and not \w+)*", config.getoption("markexpr"))
    if asked is None or not re.fullmatch(r"test_.*\.py", collection_path.name):
        return None
    return None if f"mark.{asked[1]}" in collection_path.read_text() else True


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse what would be passed over: a test that has its mark from another file."""
    for mark in MARKS:
        for path in {item.path for item in items if item.get_closest_marker(mark)}:
            if f"mark.{mark}" not in path.read_text():
                raise pytest.UsageError(f"{path} has a test that is marked {mark}: say pytest.mark.{mark} in that file")


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
