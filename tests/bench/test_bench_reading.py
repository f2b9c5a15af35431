"""What is read out of reports: ratios, significance, floors, laws of growth, the late rank, the page."""

from __future__ import annotations

import json
import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from made import RANKS, bench, report, valid

from ckptstore.errors import InvalidInput
from ckptstore.tools.bench.claims import CLAIMS
from ckptstore.tools.bench.figures.compare import compare, rank_sum_p, smallest_p
from ckptstore.tools.bench.figures.floors import check, read_floors
from ckptstore.tools.bench.figures.page import Curve, curves, page
from ckptstore.tools.bench.figures.report import Report
from ckptstore.tools.bench.figures.text import claim, rows
from ckptstore.tools.bench.timeline import aligned, straggler
from ckptstore.tools.bench.workloads import exponent, line
from ckptstore.tools.cli.commands.bench import options_of

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import record  # noqa: E402

OURS, SLOWER = [1.0, 1.1, 1.2, 1.3, 1.4], [2.0, 2.1, 2.2, 2.3, 2.4]


def test_ratios_are_of_medians_and_say_how_much_faster_ckptstore_is() -> None:
    (workload,) = report(ours=OURS, peer=[2.4, 2.4, 9.0], limit=[0.6]).workloads
    assert [workload.ratio(workload.best(role)) for role in ("peer", "limit")] == pytest.approx([2.0, 0.5])
    assert workload.to_json()["outcomes"][0]["summary"]["gigabytes_per_second"] == pytest.approx(0.8948, rel=1e-3)


def test_a_report_survives_json() -> None:
    found = report(ours=OURS, peer=SLOWER, limit=[0.6])
    value = json.loads(json.dumps(found.to_json()))
    valid(value)
    assert json.loads(json.dumps(Report.from_json(value).to_json())) == value


@pytest.mark.parametrize("place", ["", "workloads/0", "workloads/0/outcomes/0", "workloads/0/outcomes/0/samples/0"])
def test_the_schema_refuses_what_it_does_not_name(place: str) -> None:
    value = report(ours=OURS).to_json()
    inside: Any = value
    for name in filter(None, place.split("/")):
        inside = inside[int(name)] if name.isdigit() else inside[name]
    inside["surprise"] = 1
    with pytest.raises(jsonschema.ValidationError):
        valid(value)


@pytest.mark.parametrize(
    ("first", "second"),
    [(OURS, SLOWER), ([1.0, 3.0, 5.0], [2.0, 4.0, 6.0, 8.0]), ([1.0, 2.0, 9.0, 10.0], [3.0, 4.0, 5.0])],
)
def test_the_p_value_is_that_of_scipy(first: list[float], second: list[float]) -> None:
    stats = pytest.importorskip("scipy.stats")
    expected = stats.mannwhitneyu(first, second, method="exact").pvalue
    assert rank_sum_p(first, second) == pytest.approx(expected)


def test_many_samples_and_ties_are_judged_as_by_scipy() -> None:
    stats = pytest.importorskip("scipy.stats")
    first, second = [float(value % 7) for value in range(30)], [float(value % 9) for value in range(30)]
    expected = stats.mannwhitneyu(first, second, method="asymptotic").pvalue
    assert rank_sum_p(first, second) == pytest.approx(expected, rel=1e-6)
    assert rank_sum_p([1.0] * 30, [1.0] * 30) == 1.0


def test_few_samples_can_show_nothing() -> None:
    assert smallest_p(5, 5) == pytest.approx(2 / 252)
    assert smallest_p(3, 3) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("after", "verdict"),
    [
        (SLOWER, "slower"),
        ([0.1, 0.2, 0.3, 0.4, 0.5], "faster"),
        ([0.9, 1.05, 1.25, 1.35, 1.5], "no change shown"),
        ([9.0, 9.1, 9.2], "slower"),
        ([9.0], "too few samples"),
    ],
)
def test_a_change_is_told_only_where_the_spread_allows_it(after: list[float], verdict: str) -> None:
    found = compare(report(ours=OURS, limit=[0.5] * 5), report(ours=after, limit=[0.5] * 5))
    valid(found.to_json())
    assert {change.contender: change.verdict for change in found.changes}["ckptstore"] == verdict


def test_what_makes_two_runs_hard_to_compare_is_named(tmp_path: Path) -> None:
    first, second = report(ours=OURS).to_json(), report(ours=SLOWER).to_json()
    second["versions"] = {"torch": "3.0"}
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, value in zip(paths, (first, second), strict=True):
        path.write_text(json.dumps(value))
    output = bench("compare", *paths).output
    assert "differs: version of torch: 2.13.0 before, 3.0 after" in output
    assert re.search(r"ckptstore +1\.2000 +2\.2000 +0\.55 +0\.008 +slower", output)
    bench("compare", code=2)


@pytest.mark.parametrize("text", ["{}", "[]", "null", "{", '"x"', "bad outcome"])
def test_compare_refuses_what_is_no_report(tmp_path: Path, text: str) -> None:
    if text == "bad outcome":
        value = report(ours=OURS).to_json()
        value["workloads"][0]["outcomes"] = [[1]]
        text = json.dumps(value)
    (tmp_path / "a.json").write_text(text)
    path = tmp_path / "a.json"
    assert "a.json is no report" in bench("compare", path, path, code=InvalidInput.exit_code).output


def test_options_that_do_not_go_with_what_is_asked_for_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps(report(ours=OURS).to_json()))
    for option, value in (("--floors", path), ("--html", path), ("--size", "1MiB"), ("--storage-option", "a=b")):
        output = bench("compare", path, path, option, value, code=2).output
        assert f"{option} does not go with compare, which measures nothing" in output
    assert "--size does not go with readme" in bench("readme", "--size", "1MiB", code=2).output
    assert "no effect" in bench("save", "--size", "1MiB", "--device", "cpu", code=2).output


def test_what_only_one_of_two_runs_measured_is_told() -> None:
    before = report(ours=OURS, peer=SLOWER)
    (workload,) = before.workloads
    failed = replace(workload.outcomes[0], status="failed", reason="rank 0: no luck", samples=())
    other = replace(workload, name="load", title="Load")
    after = replace(before, workloads=(replace(workload, outcomes=(failed,)), other))
    found = compare(before, after)
    valid(found.to_json())
    size = "1073741824 bytes, 1 ranks"
    assert found.differences == (
        f"ckptstore in Save a state (save, {size}): measured before, failed (rank 0: no luck) after",
        f"DCP FileSystemWriter in Save a state (save, {size}): measured before, not there after",
        f"workload Load (load, {size}): not before, after",
    )


PEER, BOTH = {"contender": "DCP FileSystemWriter"}, ["raw disk", "DCP FileSystemWriter"]


@pytest.mark.parametrize(
    ("against", "floor", "verdicts"),
    [
        (PEER, 1.8, ["ok"]),
        (PEER, 1.9, ["BELOW"]),
        ({"role": "limit"}, 0.5, ["ok"]),
        ({"role": "limit"}, 0.51, ["BELOW"]),
        ({"slowest_of": BOTH}, 1.8, ["ok"]),
        ({"slowest_of": BOTH}, 1.9, ["BELOW"]),
        ({"slowest_of": [*BOTH[1:], "gone"]}, 0.1, ["BELOW"]),
        ({"slowest_of": []}, 0.1, ["BELOW"]),
        ({"contender": "gone"}, 0.1, ["BELOW"]),
        ({"contender": "gone", "workload": "load"}, 0.1, []),
    ],
)
def test_a_floor_holds_below_what_was_measured(against: dict[str, Any], floor: float, verdicts: list[str]) -> None:
    """One against nobody does not hold, and one of another workload is not asked."""
    measured = report(ours=OURS, peer=SLOWER, limit=[0.6])
    found = check(measured, [{"workload": "save", "floor": floor, **against}])
    assert [str(verdict).partition(":")[0] for verdict in found] == verdicts


def test_a_floor_holds_at_each_size_of_a_store() -> None:
    small = report(ours=[1.0], limit=[1.0])
    large = replace(small.workloads[0], title="larger", outcomes=report(ours=[1.0], limit=[0.1]).workloads[0].outcomes)
    both = replace(small, workloads=(*small.workloads, large))
    verdicts = check(both, [{"workload": "save", "role": "limit", "floor": 0.5}])
    assert [verdict.holds for verdict in verdicts] == [True, False]
    assert str(verdicts[1]).startswith("BELOW: save, larger against the best limit")


def test_floors_that_check_nothing_do_not_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptstore.tools.cli.commands.bench._measure", lambda *_: report(ours=OURS))
    path = tmp_path / "floors.json"
    path.write_text('{"floors": [{"workload": "load", "role": "peer", "floor": 1}]}')
    output = bench("save", "--floors", path, code=1).output
    assert "BELOW: the file has no floor of what was measured" in output


@pytest.mark.parametrize("name", ["floors", "floors-disk", "floors-s3", "floors-tier"])
def test_the_recorded_floors_can_be_read(name: str) -> None:
    recorded = read_floors(ROOT / f"benchmarks/{name}.json")
    assert all(floor["floor"] > 0 for floor in recorded)
    assert all(floor["why"] for floor in recorded)
    assert f"--floors benchmarks/{name}.json" in (ROOT / "Makefile").read_text()


def test_a_line_is_found_and_its_error_told() -> None:
    numbers = [64.0, 256.0, 1024.0]
    assert line(numbers, [2 + 0.5 * number for number in numbers]) == pytest.approx((2, 0.5, 0))
    assert line(numbers, [number**2 for number in numbers])[2] > 0.5
    assert exponent(numbers, [3 * number**2 for number in numbers]) == pytest.approx(2)
    with pytest.raises(ValueError, match="two different numbers"):
        line([8.0, 8.0], [1.0, 2.0])


def test_the_late_rank_is_found_and_an_even_save_has_none() -> None:
    assert straggler(RANKS) == pytest.approx((1, 0.5))
    assert straggler([{**rank, "stored": 0.4} for rank in RANKS]) is None
    assert straggler(RANKS[:1]) is None


def test_the_leader_commits_once_the_last_rank_has_stored() -> None:
    leader, other = aligned([{**rank, "start": 5.0, "stored": 5 + rank["stored"], "end": 6.0} for rank in RANKS])
    phases = {span["phase"]: span for span in leader["spans"]}
    assert (phases["wait"]["start"], phases["wait"]["end"]) == pytest.approx((0.4, 0.9))
    assert (phases["commit"]["start"], phases["commit"]["end"]) == pytest.approx((0.9, 1.0))
    assert [span["phase"] for span in other["spans"]].count("commit") == 0


def test_the_page_needs_no_network_and_escapes_what_it_shows() -> None:
    text = page(report(ours=OURS, peer=SLOWER, limit=[0.6]))
    assert "<b>broken" not in text
    assert "no &lt;luck&gt;" in text
    assert text.count("<svg") == 1
    assert '"label":"rank 1","late":true' in text
    assert not re.search(r"(src|href)=(?!\"data:,\")|@import|url\(", text)


def test_curves_leave_out_what_a_logarithm_cannot_show() -> None:
    drawn = curves([Curve(label="a", points=[(1, 0.0), (10, 1.0), (100, 2.0)])], x_title="x", y_title="y")
    assert drawn.count("<circle") == 2
    assert curves([], x_title="x", y_title="y") == ""


def test_the_claims_of_the_readme_are_rows_with_fewer_rounds_and_less_data() -> None:
    page = json.loads((ROOT / "docs/performance/rows.json").read_text())
    commands = {row["workload"]: shlex.split(row["command"])[2:] for row in page["rows"]}
    readme = (ROOT / "README.md").read_text()
    assert [*CLAIMS] == re.findall(r"^\| (.+?) \|", readme.partition("| --- |")[2].partition("\n\n")[0], re.MULTILINE)
    for name, words in CLAIMS.items():
        mine, row = options_of(words.split()), options_of(commands[name])
        assert mine.repeat <= row.repeat
        assert mine.size_bytes <= row.size_bytes
        assert {*mine.peers} <= {*row.peers}
        assert replace(mine, repeat=0, size_bytes=0, peers=()) == replace(row, repeat=0, size_bytes=0, peers=())
    floors = read_floors(ROOT / "benchmarks/floors-readme.json")
    assert {floor["workload"] for floor in floors} == {*CLAIMS}


def test_a_claim_names_the_best_peer_and_the_limit() -> None:
    (workload,) = report(ours=[1.0], peer=[2.5], limit=[0.5]).workloads
    assert claim(workload) == ["save (1024 MiB)", "2.50 times DCP FileSystemWriter", "0.50"]
    (workload,) = report(ours=[1.0]).workloads
    assert claim(workload)[1:] == ["not measured", "not measured"]


def test_a_row_is_made_of_all_rounds_of_all_runs() -> None:
    runs = [
        record.workload_of(report(ours=[1.0, 1.2], peer=[2.0], limit=[0.8]).to_json()),
        record.workload_of(report(ours=[1.1], peer=[2.4], limit=[0.9]).to_json()),
    ]
    runs = [replace(run, outcomes=run.outcomes[:-1]) for run in runs]  # without the one that failed
    aims = [{"contender": "DCP FileSystemWriter", "at_least": 3}, {"role": "limit", "at_least": 0.7}]
    assert record.cells(record.joined(runs), aims) == {
        "ours": "1.1 s (1 to 1.2), 2.2 CPU s/GiB",
        "peer": "DCP FileSystemWriter: 2.2 s (2 to 2.4), 4.4 CPU s/GiB",
        "limit": "raw disk: 0.85 s (0.8 to 0.9), 1.7 CPU s/GiB",
        "verdict": "2 times DCP FileSystemWriter where 3 was the aim: **missed**; "
        "0.773 of the limit where 0.7 was the aim: met",
    }
    with pytest.raises(ValueError, match="nothing was measured for the aim"):
        record.cells(runs[0], [{"contender": "nobody", "at_least": 1}])


def test_a_row_is_not_written_without_a_contender_that_failed() -> None:
    value = report(ours=[1.0], peer=[2.0]).to_json()
    with pytest.raises(ValueError, match="<b>broken</b>: rank 1: no <luck>"):
        record.joined([record.workload_of(value)])
    with pytest.raises(ValueError, match="unpack"):
        record.workload_of({**value, "workloads": 2 * value["workloads"]})


def test_the_text_has_the_rates_of_the_json_and_none_of_steps() -> None:
    (workload,) = report(ours=[2.0], limit=[1.0]).workloads
    samples = tuple(replace(sample, blocked_seconds=0.5) for sample in workload.outcomes[0].samples)
    stall = replace(workload, figure="blocked_seconds", outcomes=(replace(workload.outcomes[0], samples=samples),))
    (row,) = rows(stall)
    assert (row[1], row[3]) == ("0.5000", "0.54")
    assert stall.to_json()["outcomes"][0]["summary"]["gigabytes_per_second"] == pytest.approx(0.5369, rel=1e-3)
    steps = replace(stall, name="tier-steps")
    assert rows(steps)[0][3:5] == ["", ""]
    assert steps.to_json()["outcomes"][0]["summary"]["gigabytes_per_second"] is None


def test_a_row_of_the_suite_is_one_group() -> None:
    def benchmark(name: str, role: str, group: str, seconds: float) -> dict[str, Any]:
        info = {"contender": name, "role": role, "size_bytes": 1 << 30, "cpu_seconds": 0.5}
        return {"group": group, "stats": {"data": [seconds]}, "extra_info": info}

    ours, peer = benchmark("ckptstore", "ckptstore", "a", 1.0), benchmark("Ray, ASYNC", "peer", "a", 3.0)
    found = record.cells(record.workload_of({"benchmarks": [ours, peer]}), ())
    assert (found["peer"], found["verdict"]) == ("Ray, ASYNC: 3 s (3 to 3), 0.5 CPU s/GiB", "3 times Ray, ASYNC")
    with pytest.raises(ValueError, match="one group"):
        record.workload_of({"benchmarks": [ours, benchmark("x", "peer", "b", 1.0)]})
