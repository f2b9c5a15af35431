"""What the benchmarks add to pytest-benchmark: rounds in which all contenders of a group take turns, and floors."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from sizes import count

from ckptstore.tools.bench.figures.floors import FloorVerdict, check, read_floors
from ckptstore.tools.bench.figures.report import OURS, Report, Sample, Workload, WorkloadOutcome, summary
from ckptstore.tools.bench.figures.text import settings_text


@dataclass(kw_only=True)
class Row:
    """One contender of a group: all its rounds, which are tests of their own and one line of the table."""

    group: str
    outcome: WorkloadOutcome
    size_bytes: int
    figure: str
    metadata: Any
    samples: list[Sample] = field(default_factory=list)

    def workload(self) -> Workload:
        """What `ckptstore bench` says of it."""
        one = WorkloadOutcome.of(self.outcome.name, self.samples, role=self.outcome.role, family=self.outcome.family)
        return Workload(
            name=self.group, title=self.group, size_bytes=self.size_bytes, ranks=1, figure=self.figure, outcomes=(one,)
        )

    def extra_info(self) -> dict[str, Any]:
        """Throughput, seconds of processors, memory, and on a test server requests and bytes, as medians."""
        figures = summary(WorkloadOutcome.of(self.outcome.name, self.samples), self.size_bytes) or {}
        found = {name: value["median"] if isinstance(value, dict) else value for name, value in figures.items()}
        found |= {"size_bytes": self.size_bytes, "settings": settings_text(self.outcome.settings)}
        found |= {"contender": self.outcome.name, "role": self.outcome.role}
        return {name: value for name, value in (found | dict(self.outcome.facts)).items() if value not in (None, "")}


ROWS = pytest.StashKey[dict[str, Row]]()
FLOORS = pytest.StashKey[list[dict[str, Any]]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--floors", type=Path, metavar="FILE", help="Fail when a ratio is below what the file says.")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[ROWS] = {}
    path = config.getoption("--floors")
    config.stash[FLOORS] = read_floors(path) if path else []


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let all contenders of a group take turns: round by round, in each round in an order of its own."""
    groups: dict[object, int] = {}

    def place(item: pytest.Item) -> tuple[int, int, float]:
        mark = item.get_closest_marker("benchmark")
        group = groups.setdefault(mark.kwargs.get("group", item) if mark else item, len(groups))
        number = getattr(item, "callspec", None) and item.callspec.params.get("turn")  # type: ignore[attr-defined]
        return (group, 0, 0.0) if number is None else (group, number, Random(item.nodeid).random())

    items.sort(key=place)


@pytest.fixture
def take(benchmark: Any, request: pytest.FixtureRequest) -> Callable[..., WorkloadOutcome]:
    """Take one turn, on the clock of what is timed in it, and add it to the row of its contender."""
    rows = request.config.stash[ROWS]

    def run(
        turn: Callable[[], tuple[WorkloadOutcome, int]], *, figure: str = "total_seconds", **facts: Any
    ) -> WorkloadOutcome:
        """Return the outcome of the turn. What cannot take part is skipped; what fails fails."""

        def timed() -> tuple[WorkloadOutcome, int]:
            outcome, size_bytes = turn()
            count(statistics.median([getattr(sample, figure) for sample in outcome.samples] or [0.0]))
            return outcome, size_bytes

        for name in ("name", "fullname", "param"):
            setattr(benchmark, name, re.sub(r"-?turn\d+", "", getattr(benchmark, name)))
        outcome, size_bytes = benchmark.pedantic(timed)
        if outcome.status == "skipped":
            benchmark.has_error = True
            pytest.skip(str(outcome.reason))
        assert outcome.status == "measured", outcome.reason
        if benchmark.stats is not None:
            mine = Row(
                group=benchmark.group, outcome=outcome, size_bytes=size_bytes, figure=figure, metadata=benchmark.stats
            )
            row = rows.setdefault(benchmark.fullname, mine)
            if row is not mine:
                row.metadata.update(benchmark.stats.stats.data[-1])
                request.config._benchmarksession.benchmarks.remove(benchmark.stats)  # type: ignore[attr-defined]
            row.samples += outcome.samples
            row.metadata.extra_info.update(row.extra_info() | facts)
        return outcome

    return run


def verdicts(config: pytest.Config) -> list[FloorVerdict]:
    """Every floor of the file; one whose group did not run does not hold."""
    floors = config.stash[FLOORS]
    found: dict[str, Workload] = {}
    for row in config.stash[ROWS].values():
        one = row.workload()
        found[one.name] = replace(one, outcomes=found.get(one.name, one).outcomes + one.outcomes)
    report = Report(created_at=0, command="", machine={}, versions={}, asked={}, workloads=tuple(found.values()))
    missing = [
        FloorVerdict(workload=floor["workload"], against=OURS, floor=float(floor["floor"]), ratio=None)
        for floor in floors
        if floor["workload"] not in found
    ]
    return [*check(report, floors), *missing]


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Fail when a floor does not hold."""
    if exitstatus == pytest.ExitCode.OK and not all(verdict.holds for verdict in verdicts(session.config)):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Show the floors."""
    for verdict in verdicts(config):
        terminalreporter.write_line(str(verdict))
