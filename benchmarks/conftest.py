"""The report of all cases that ran: shown at the end, written where `--report` says, held to `--floors`."""

from __future__ import annotations

import json
import shlex
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sizes import FULL, ROUNDS

from ckptstore.tools.bench import machine
from ckptstore.tools.bench.destination import Place
from ckptstore.tools.bench.figures.floors import FloorVerdict, check, read_floors
from ckptstore.tools.bench.figures.report import Report, Workload
from ckptstore.tools.cli.commands.bench import echo_workload

STARTED = time.time()
WORKLOADS = pytest.StashKey[list[Workload]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--report", type=Path, metavar="FILE", help="Write what `ckptstore bench --json` writes.")
    parser.addoption("--floors", type=Path, metavar="FILE", help="Fail when a ratio is below what the file says.")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[WORKLOADS] = []


@pytest.fixture
def tell(request: pytest.FixtureRequest) -> Callable[[Workload], None]:
    """Puts a workload into the report, by the name of its case."""
    return lambda workload: request.config.stash[WORKLOADS].append(replace(workload, name=request.node.name))


def report_of(config: pytest.Config) -> Report:
    """All that was told."""
    return Report(
        created_at=STARTED,
        command=shlex.join(["pytest", *config.invocation_params.args]),
        machine=machine.describe(Place(uri=tempfile.gettempdir())),
        versions=machine.versions(),
        asked={"full": FULL, "rounds": ROUNDS},
        workloads=tuple(config.stash[WORKLOADS]),
    )


def verdicts(config: pytest.Config) -> list[FloorVerdict]:
    """Every floor of the file; one whose case did not run does not hold."""
    path = config.getoption("--floors")
    floors: list[dict[str, Any]] = read_floors(path) if path else []
    ran = {workload.name for workload in config.stash[WORKLOADS]}
    missing = [
        FloorVerdict(workload=floor["workload"], against="anybody", floor=float(floor["floor"]), ratio=None)
        for floor in floors
        if floor["workload"] not in ran
    ]
    return [*check(report_of(config), floors), *missing]


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Fail when a floor does not hold."""
    if path := session.config.getoption("--report"):
        path.write_text(json.dumps(report_of(session.config).to_json(), indent=1) + "\n")
    if exitstatus == pytest.ExitCode.OK and not all(verdict.holds for verdict in verdicts(session.config)):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """The tables of `ckptstore bench`, and the verdicts."""
    for workload in config.stash[WORKLOADS]:
        echo_workload(workload)
    for verdict in verdicts(config):
        terminalreporter.write_line(str(verdict))
