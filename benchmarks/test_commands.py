"""The commands that measure the figures of docs/performance.md, as they stand in its rows.

At a small size these are the rows of the table alone: tests/bench runs the other workloads.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from sizes import FULL

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import forked_ranks

from ckptstore.tools.bench.figures.report import Report, Workload
from ckptstore.tools.cli import main

ROWS = json.loads((Path(__file__).parents[1] / "docs/performance/rows.json").read_text())
COMMANDS = {row["workload"]: row["command"] for row in [*ROWS["rows"], *(ROWS["beside"] if FULL else [])]}
SMALL = ["--size", "2MiB", "--repeat", "1"]


@pytest.fixture(autouse=True)
def _torch_is_imported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """At small sizes, most of the time would be the imports of each rank."""
    if not FULL:
        monkeypatch.setattr("ckptstore.tools.bench.run.run_ranks", forked_ranks.run_ranks)


@pytest.mark.parametrize("what", [what for what, command in COMMANDS.items() if command.startswith("ckptstore bench")])
def test_command(tell: Callable[[Workload], None], tmp_path: Path, what: str) -> None:
    words = shlex.split(COMMANDS[what])[1:] + ([] if FULL else SMALL)
    done = CliRunner().invoke(main, [*words, "--json", str(tmp_path / "report.json")])
    assert done.exit_code == 0, done.output
    for workload in Report.from_json(json.loads((tmp_path / "report.json").read_text())).workloads:
        assert [one.reason for one in workload.outcomes if one.status == "failed"] == []
        tell(replace(workload, title=f"{what}: {workload.title}"))
