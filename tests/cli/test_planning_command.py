"""`ckptstore plan`: what is given arrives in its unit, and what is told can be believed."""

from __future__ import annotations

from typing import Any

import pytest

JOB = (
    *("plan", "--nodes", 64, "--ranks-per-node", 8, "--state", "1.2TB", "--disk", "3GB/s", "--network", "96Gbit/s"),
    *("--bucket", "200MB/s", "--bucket-total", "2GB/s", "--node-mtbf", "125d", "--job-mtbf", "48h"),
    *("--stall", "2s", "--step", "8", "--restart", "5m", "--several-at-once", "5%"),
)


def test_every_quantity_arrives_in_its_unit(run_json: Any) -> None:
    found = run_json(*JOB, "--drain-every", "30min", "--grace", "2h")
    given = {name: value for name, value in found["given"].items() if value is not None}
    counts = {"num_nodes": 64, "ranks_per_node": 8, "keep": 2, "bucket_keep": 3}
    shares = {"disk_survives_share": 0, "several_nodes_share": 0.05}
    seconds = {"node_mtbf": 125 * 86400, "job_mtbf": 48 * 3600, "stall": 2, "step": 8, "restart": 300}
    seconds |= {"drain": 1800, "grace": 7200}
    speeds = {"disk": 3e9, "network": 12e9, "bucket": 2e8, "bucket_total": 2e9}
    assert given == {
        **counts,
        **shares,
        **{f"{name}_seconds": value for name, value in seconds.items()},
        **{f"{name}_bytes_per_second": value for name, value in speeds.items()},
        "state_bytes": 1.2e12,
    }
    alone, one, two = found["outlooks"]
    assert (alone["complete_seconds"], one["complete_seconds"], two["complete_seconds"]) == (600, 6.25, 12.5)
    assert (alone["durable_seconds"], one["durable_seconds"]) == (600, 1800)
    assert two["lost_rank_hours_per_day"] == pytest.approx(two["lost_seconds_per_day"] / 3600 * 512)
    assert two["lost_cost_per_day"] is None
    cost = run_json(*JOB, "--node-hour-cost", "30")["outlooks"][2]
    assert cost["lost_cost_per_day"] == pytest.approx(30 * cost["lost_node_hours_per_day"])


def test_the_text_says_what_it_rests_on(run: Any) -> None:
    text = run(*JOB).stdout
    lines = {line.split("  ")[0]: line for line in text.splitlines()}
    assert lines["in the bucket every"].split()[-2:] == ["10", "min"]
    for word in ("Young 1974: sqrt(2 * stall * MTBF)", "Daly 2006:", "Communications of the ACM", "Assumptions"):
        assert word in text
    assert "Fast, 2 copies loses least" in text
    assert "in money" not in text
    assert "in money" in run(*JOB, "--node-hour-cost", 30).stdout


def test_what_a_reader_would_overlook_is_told(run_json: Any) -> None:
    def notes(*more: object) -> str:
        return "\n".join(run_json(*JOB, *more)["notes"])

    assert "less than 1 %" in notes("--bucket", "1TB/s", "--bucket-total", "1TB/s")
    assert "are rough" in notes("--job-mtbf", "10min")
    assert "need two nodes" in notes("--nodes", 1)
    assert "cannot take one every 10 s" in notes("--drain-every", 10)
    without = [word for word in JOB if word not in ("--network", "96Gbit/s")]
    assert "Two copies are left out" in "\n".join(run_json(*without)["notes"])
    never = run_json(*JOB, "--several-at-once", 1, "--job-mtbf", "1000w")["outlooks"][1]
    assert never["answered_share"] < 0.01


def test_a_bucket_is_not_good_enough_for_a_job_that_gets_nowhere(run_json: Any) -> None:
    found = run_json(*JOB, "--node-mtbf", "10min", "--several-at-once", 1)
    assert [outlook["lost_seconds_per_day"] for outlook in found["outlooks"]] == [86400.0] * 3
    assert found["notes"][0].startswith("The job gets nowhere")
    assert not any("good enough" in note for note in found["notes"])


def test_the_time_beside_steps_is_theirs(run: Any) -> None:
    text = run(*JOB, "--step", "7min").stdout
    lines = {line.split("  ")[0]: line.split()[-2:] for line in text.splitlines() if "  " in line}
    assert (lines["save every"], lines["that is"]) == (["2", "steps"], ["14", "min"])
    assert lines["best interval"] != lines["that is"]


@pytest.mark.parametrize(
    ("option", "value", "reason"),
    [
        ("--state", "80Gb", "is not like 80GB"),
        ("--state", "80GB/s", "is not like 80GB"),
        ("--disk", "3GB", "is not like 3GB/s"),
        ("--several-at-once", "120%", "is no share"),
        ("--node-mtbf", "often", "is no duration"),
        ("--stall", "-1", "must not be negative"),
        ("--step", "0", "must be above 0"),
        ("--nodes", "0", "not in the range"),
    ],
)
def test_what_cannot_be_is_refused(run: Any, option: str, value: str, reason: str) -> None:
    assert reason in run(*JOB, option, value, code=2).stderr


def test_how_often_the_job_fails_must_be_said(run: Any) -> None:
    words = [word for word in JOB if word not in ("--node-mtbf", "125d", "--job-mtbf", "48h")]
    assert "Nothing says how often the job fails" in run(*words, code=2).stderr
