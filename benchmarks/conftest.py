"""The table at the end of a benchmark run, and floors below which a ratio may not fall."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptstore.bench.figures.floors import FloorVerdict, read_floors


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--floors", type=Path, metavar="FILE", help="Fail when a ratio is below what the file says.")


def _benchmarks(config: pytest.Config) -> list[Any]:
    session = getattr(config, "_benchmarksession", None)
    return list(session.benchmarks) if session else []


def _verdicts(config: pytest.Config) -> Iterator[FloorVerdict]:
    """Every floor of the file; a workload is the name of a benchmark here. What was not measured does not hold."""
    path = config.getoption("--floors")
    ratios = {item.name: item.extra_info.get("ratios", {}) for item in _benchmarks(config)}
    for floor in read_floors(path) if path else ():
        name, against = floor["workload"], floor.get("contender") or f"the best {floor['role']}"
        ratio = ratios.get(name, {}).get(against)
        yield FloorVerdict(workload=name, against=against, floor=float(floor["floor"]), ratio=ratio)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Fail when a floor does not hold."""
    if exitstatus == pytest.ExitCode.OK and not all(verdict.holds for verdict in _verdicts(session.config)):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print, for each benchmark, ckptstore's median beside every peer's, and the facts that were counted."""
    write = terminalreporter.write_line
    if benchmarks := _benchmarks(config):
        write("")
        write("seconds are medians; a ratio above 1 means that ckptstore is faster")
    for item in benchmarks:
        facts = dict(item.extra_info)
        peers, ratios = facts.pop("peer_seconds", {}), facts.pop("ratios", {})
        size_bytes = facts.pop("size_bytes", 0)
        speed = f"  {size_bytes / item.stats.median / 1e9:.2f} GB/s" if size_bytes else ""
        write(f"{item.name}: {item.stats.median:.4f} s{speed}")
        for name, samples in peers.items():
            median = statistics.median(samples)
            spread = f"{min(samples):.4f}-{max(samples):.4f}"
            write(f"    {name:36} {median:.4f} s ({spread})  ratio {ratios[name]:.2f}")
        for name, value in facts.items():
            write(f"    {name}: {value}")
    for verdict in _verdicts(config):
        write(str(verdict))
