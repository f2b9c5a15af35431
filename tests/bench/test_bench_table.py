"""A row of the page on performance says what a report of `ckptstore bench` says."""

from __future__ import annotations

import copy
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from made import report

ROOT = Path(__file__).parents[2]
ROW = {"workload": "a save", "report": "one.json", "title": "Save a state", "verdict": "met", "commit": "0123abc"}
EMPTY: dict[str, Any] = {"machines": {"A": "cores 2, torch 2.13.0"}, "rows": [ROW]}


@pytest.fixture
def docs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The generator, with an empty directory in place of docs/."""
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs/generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "DOCS", tmp_path)
    (tmp_path / "performance/reports").mkdir(parents=True)
    return module


def write(docs: Any, **seconds: tuple[float, ...]) -> None:
    value = report(**seconds).to_json()
    outcomes = value["workloads"][0]["outcomes"]
    for peer in [outcome for outcome in outcomes if outcome["role"] == "peer" and outcome["status"] == "measured"]:
        slower = copy.deepcopy(peer)
        slower["summary"]["total_seconds"]["median"] *= 2
        outcomes += [{**slower, "name": "a slower one"}]
    (docs.DOCS / "performance/reports/one.json").write_text(json.dumps(value))


def test_a_row_has_the_medians_the_best_peer_the_limit_and_the_date_of_its_report(docs: Any) -> None:
    write(docs, ours=(0.5, 0.25, 9.0), peer=(1.0, 2.0, 3.0), limit=(0.125,))
    when = "[2027-01-15](performance/reports/one.json), 0123abc, A"
    row = f"| a save | 0.5 s | DCP FileSystemWriter: 2 s | raw disk: 0.125 s | met | {when} |"
    assert row in docs.performance_table(EMPTY).splitlines()


def test_a_contender_that_was_not_measured_is_said_to_be_so(docs: Any) -> None:
    write(docs, ours=(0.5,))
    assert "| a save | 0.5 s | not measured | not measured | met |" in docs.performance_table(EMPTY)


def test_another_machine_gets_a_line_of_its_own(docs: Any) -> None:
    write(docs, ours=(0.5,))
    text = docs.performance_table({**EMPTY, "machines": {"A": "another one"}})
    assert "0123abc, B |" in text
    assert "- Machine B: cores 2, torch 2.13.0." in text


def test_every_recorded_row_is_on_the_page_of_its_date() -> None:
    """Every figure in seconds of a row is in the history; nothing was rounded or made up on the way."""
    for row in json.loads((ROOT / "docs/performance/rows.json").read_text())["rows"]:
        history = (ROOT / f"docs/performance/history/{row['date']}.md").read_text()
        for name in ("ours", "peer", "limit"):
            for figure in (word.strip("():,;") for word in row[name].split()):
                assert figure in history or not figure[:1].isdigit(), (
                    f"{row['workload']}: {figure} is not in the history"
                )
