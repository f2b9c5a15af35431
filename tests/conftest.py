"""What every test stands on: no configuration from outside, a cache of its own, the same examples each time."""

from __future__ import annotations

import gc
import os
import re
import signal
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadFileScheduling

for name, max_examples in (("quick", 20), ("all", 200)):
    settings.register_profile(
        name,
        deadline=None,
        derandomize=True,
        max_examples=max_examples,
        suppress_health_check=[HealthCheck.too_slow],
        print_blob=True,
    )
settings.load_profile("all")

os.environ.setdefault("OMP_NUM_THREADS", "1")  # as a rank has: else the threads of several workers wait for each other

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in the background of a shell: children would ignore it too
    signal.signal(signal.SIGINT, signal.default_int_handler)

_numbers = count()

LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
MARKS = ("slow", "long", "ceph")


QUICK = f"not {' and not '.join(MARKS)}"
"""What `make test` asks for."""


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("markexpr") == QUICK:
        settings.load_profile("quick")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Pass over files that have nothing of what is asked for: each worker would import them to run nothing of them."""
    if not re.fullmatch(r"test_.*\.py", collection_path.name):
        return None
    asked = config.getoption("markexpr")
    if asked == QUICK:
        whole_file = rf"^pytestmark = \[?\s*pytest\.mark\.({'|'.join(MARKS)})\b"
        return True if re.search(whole_file, text_of(collection_path), re.MULTILINE) else None
    found = re.fullmatch(rf"\(?({'|'.join(MARKS)})( or hypothesis\))?( and not \w+)*", asked)
    if found is None:
        return None
    wanted = f"mark.{found[1]}" + ("|@given" if found[2] else "")
    return None if re.search(wanted, text_of(collection_path)) else True


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@pytest.hookimpl(optionalhook=True)  # the tests on the stand-in run without xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling:
    """Give a worker whole files, and all of Ray's to one, which has the one cluster."""
    return ByFile(config, log)


class ByFile(LoadFileScheduling):
    """Sends the tests of a file to one worker."""

    def _split_scope(self, nodeid: str) -> str:
        return "ray" if nodeid.startswith("tests/ray/") else str(super()._split_scope(nodeid))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse what would be passed over: a test that has its mark from another file."""
    for mark in MARKS:
        for path in {item.path for item in items if item.get_closest_marker(mark)}:
            if f"mark.{mark}" not in text_of(path):
                raise pytest.UsageError(f"{path} has a test that is marked {mark}: say pytest.mark.{mark} in that file")
    items.sort(key=lambda item: not item.nodeid.startswith("tests/ray/"))  # they are one unit, the longest


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
