"""The workloads of docs/performance.md, contender by contender: what the commands of its rows run."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from orders import Ranks, ranks_of
from ranks import run_ranks
from sizes import FULL, Take, group, turns

from ckptstore.tools.bench.destination import is_disk
from ckptstore.tools.bench.figures.report import Options, Report
from ckptstore.tools.bench.matrix import DISK, S3, case_of
from ckptstore.tools.bench.peers.registry import TABLES
from ckptstore.tools.bench.run import opened
from ckptstore.tools.bench.work import Task
from ckptstore.tools.bench.workloads import with_files
from ckptstore.tools.cli import main
from ckptstore.tools.cli.commands.bench import options_of

PAGE = json.loads((Path(__file__).parents[1] / "docs/performance/rows.json").read_text())
COMMANDS = {row["workload"]: shlex.split(row["command"]) for row in [*PAGE["rows"], *PAGE["beside"]]}
COMMANDS = {row: words[2:] for row, words in COMMANDS.items() if words[:2] == ["ckptstore", "bench"]}
ROWS = {row["workload"] for row in PAGE["rows"]}
CONTESTS = ("save", "load", "async", "directory", "node-cache")
SMALL = ["--size", "2MiB", "--repeat", "1", "--pause-seconds", "0"]
SOON = {
    "durable save, Llama, 1 rank",
    "load from the page cache, Even, 1 rank",
    "stall of `save_async`, Even",
    "save to S3 in memory, 1 GiB",
}
"""What each change to the project runs. The others have other states or places, and the same contenders."""


def contests() -> list[Any]:
    """Each contender that suits the place of a row, in each round. Which ones are installed is seen in their turn."""
    found = []
    for row, words in COMMANDS.items():
        if words[0] in CONTESTS and (FULL or row in ROWS):
            options = options_of(words + ([] if FULL else SMALL))
            suits = case_of(DISK if is_disk(options.to) else S3, options.ranks)
            marks = [group(row)] if row in SOON else [group(row), pytest.mark.long]
            task = Task(name=words[0], options=options, place=DISK, size_bytes=0)
            for kind in task.contenders():
                slug = re.sub(r"\W+", "-", f"{row}-{kind.name}")
                found += [
                    pytest.param(options, kind.name, *turn.values, id=f"{slug}-{turn.id}", marks=marks)
                    for turn in (turns(options.repeat) if kind.unfit(suits) is None else ())
                ]
    return found


class Stage:
    """The ranks of one contest after the other."""

    def __init__(self) -> None:
        self._options: Options | None = None
        self._opened = ExitStack()

    def ranks(self, options: Options) -> Ranks:
        """Those that run this one; those of another one end."""
        if options is not self._options:
            self.close()
            place, size_bytes = self._opened.enter_context(opened(options, {}))
            task = Task(name=options.workloads[0], options=options, place=place, size_bytes=size_bytes)
            task, _ = self._opened.enter_context(with_files(task))
            self._ranks = self._opened.enter_context(ranks_of(task))
            self._options = options
        return self._ranks

    def close(self) -> None:
        """End all."""
        self._options = None
        self._opened.close()


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with closing(Stage()) as opened_stage, pytest.MonkeyPatch.context() as patch:
        patch.setattr("ckptstore.tools.bench.run.run_ranks", run_ranks)
        yield opened_stage


@pytest.mark.parametrize(("options", "contender", "turn"), contests())
def test_contender(take: Take, stage: Stage, options: Options, contender: str, turn: int) -> None:
    """One turn."""
    ranks = stage.ranks(options)
    take(lambda: ranks.turn(contender), figure=TABLES[options.workloads[0]].figure)


@pytest.mark.skipif(not FULL, reason="tests/bench runs these workloads at a small size")
@pytest.mark.parametrize("row", [row for row, words in COMMANDS.items() if words[0] not in CONTESTS])
def test_command(benchmark: Any, tmp_path: Path, row: str) -> None:
    """What is no contest of contenders: the figures are those that the command shows."""
    path = tmp_path / "report.json"
    done = benchmark.pedantic(lambda: CliRunner().invoke(main, ["bench", *COMMANDS[row], "--json", str(path)]))
    assert done.exit_code == 0, done.output
    print(done.output)
    for workload in Report.from_json(json.loads(path.read_text())).workloads:
        assert [one.reason for one in workload.outcomes if one.status == "failed"] == []
