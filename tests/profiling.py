"""Measures what each test costs, by `make test-profile`: seconds on the wall, and of processors with all children.

A plugin of pytest (`-p profiling --profile-to FILE`). The file gets a line for each test; the tables by folder and by
kind end the output. A child counts in the test that waited for its end, what several tests share in the first of them.
"""

from __future__ import annotations

import json
import os
import resource
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

KINDS: dict[str, Callable[[pytest.Item, float], bool]] = {
    "Ray": lambda item, _: "ray" in item.path.parts,
    "browser": lambda item, _: "browser" in item.path.parts,
    "Hypothesis": lambda item, _: item.get_closest_marker("hypothesis") is not None,
    "forked ranks": lambda item, children: children > 0 and hasattr(item.module, "run_ranks"),  # type: ignore[attr-defined]
    "processes": lambda _, children: children > 0.02,
    "servers": lambda item, _: "servers" in item.path.parts or hasattr(item.module, "s3_server"),  # type: ignore[attr-defined]
    "threads as ranks": lambda item, _: hasattr(item.module, "run_threads"),  # type: ignore[attr-defined]
    "plain": lambda *_: True,
}
"""The kinds, of which a test has the first that holds, by the test and the seconds of its children."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--profile-to", type=Path, required=True, help="the file that gets a line for each test")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.getoption("profile_to").write_text("")


def _now() -> tuple[float, float, float]:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.perf_counter(), time.process_time(), children.ru_utime + children.ru_stime


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    before = _now()
    result = yield
    wall, own, children = (now - then for now, then in zip(_now(), before, strict=True))
    kind = next(name for name, holds in KINDS.items() if holds(item, children))
    line = {"test": item.nodeid, "kind": kind, "wall": wall, "own": own, "children": children}
    with item.config.getoption("profile_to").open("a") as file:
        file.write(json.dumps(line) + "\n")
    return result


def pytest_collection_finish(session: pytest.Session) -> None:
    """Count what a worker has spent before its first test: the start and the imports of all files."""
    if session.items:
        line = {"test": "collecting", "kind": "collecting", "wall": 0, "own": time.process_time(), "children": 0}
        with session.config.getoption("profile_to").open("a") as file:
            file.write(json.dumps({**line, "test": f"collecting/{os.getpid()}"}) + "\n")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    lines = [json.loads(line) for line in config.getoption("profile_to").read_text().splitlines()]
    for name, group in (("folder", lambda line: line["test"].rpartition("/")[0]), ("kind", lambda line: line["kind"])):
        sums: dict[str, list[float]] = defaultdict(lambda: [0.0] * 4)
        for line in lines:
            spent = (1, line["wall"], line["own"], line["children"])
            sums[group(line)] = [old + new for old, new in zip(sums[group(line)], spent, strict=True)]
        terminalreporter.write_line(f"\n{name:28}  tests   wall s    own s  children s")
        for key, (count, *seconds) in sorted(sums.items(), key=lambda item: -sum(item[1][2:])):
            terminalreporter.write_line(f"{key:28} {count:6.0f} {seconds[0]:8.1f} {seconds[1]:8.1f} {seconds[2]:11.1f}")
