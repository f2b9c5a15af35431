"""The calculator: its formulas against searches and a simulation, and what must hold for every job."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ckptstore.errors import InvalidInput
from ckptstore.tools.planning.intervals import daly_seconds, young_seconds
from ckptstore.tools.planning.outlook import DAY_SECONDS, Outlook, outlooks
from ckptstore.tools.planning.planned_job import PlannedJob

HOUR = 3600.0
JOB = PlannedJob(
    num_nodes=64,
    ranks_per_node=8,
    state_bytes=1.2e12,
    disk_bytes_per_second=3e9,
    network_bytes_per_second=12e9,
    bucket_bytes_per_second=2e8,
    bucket_total_bytes_per_second=2e9,
    node_mtbf_seconds=3000 * HOUR,
    job_mtbf_seconds=48 * HOUR,
    several_nodes_share=0.05,
    stall_seconds=2.0,
    step_seconds=8.0,
    restart_seconds=300.0,
)

SHARES = st.sampled_from([0.0, 0.05, 0.5, 1.0])
JOBS = st.builds(
    PlannedJob,
    num_nodes=st.integers(1, 5000),
    state_bytes=st.floats(1e6, 1e14),
    disk_bytes_per_second=st.floats(1e7, 1e11),
    network_bytes_per_second=st.none() | st.floats(1e7, 1e11),
    bucket_bytes_per_second=st.floats(1e6, 1e10),
    bucket_total_bytes_per_second=st.none() | st.floats(1e7, 1e12),
    node_mtbf_seconds=st.floats(10 * HOUR, 1e5 * HOUR),
    job_mtbf_seconds=st.none() | st.floats(HOUR, 1e4 * HOUR),
    disk_survives_share=SHARES,
    several_nodes_share=SHARES,
    stall_seconds=st.just(0.0) | st.floats(1e-3, 100.0),
    step_seconds=st.floats(0.01, 100.0),
    restart_seconds=st.sampled_from([0.0, 300.0]),
    keep=st.integers(1, 5),
    drain_seconds=st.sampled_from([0.0, HOUR]),
)
FACTORS = st.floats(1.01, 100.0)


def lost(job: PlannedJob) -> dict[int, float]:
    return {outlook.copies: outlook.lost_seconds_per_day for outlook in outlooks(job)}


def assert_no_worse(better: PlannedJob, worse: PlannedJob) -> None:
    """In each way to save. Daly's interval is near the optimum, not on it: hence the tolerance."""
    for copies, seconds in lost(worse).items():
        assert lost(better).get(copies, 0.0) <= seconds * 1.02 + 1e-9


# The formulas


def daly_model(interval: float, stall: float, mtbf: float) -> float:
    """The time that a second of training takes, by the model that Daly's formula is an approximation for."""
    return mtbf * math.expm1((interval + stall) / mtbf) / interval


@given(st.floats(1e-3, 1e4), st.floats(1.0, 1e8))
def test_the_formulas_find_the_minimum_of_their_models(stall: float, mtbf: float) -> None:
    young, daly = young_seconds(stall, mtbf), daly_seconds(stall, mtbf)
    assume(stall < mtbf / 4)
    tried = [daly * 1.002**power for power in range(-300, 300)]
    assert daly_model(daly, stall, mtbf) <= min(daly_model(each, stall, mtbf) for each in tried) * 1.0005
    first_order = [stall / each + each / 2 / mtbf for each in (young * 0.99, young, young * 1.01)]
    assert min(first_order) == first_order[1]


@given(st.floats(1e-3, 1e4), st.floats(1.0, 1e8), FACTORS)
def test_the_formulas_have_no_units(stall: float, mtbf: float, factor: float) -> None:
    for formula in (young_seconds, daly_seconds):
        assert formula(stall * factor, mtbf * factor) == pytest.approx(factor * formula(stall, mtbf), rel=1e-6)
    if stall < 2 * mtbf:
        assert daly_seconds(stall, mtbf) <= young_seconds(stall, mtbf) <= daly_seconds(stall, mtbf) + stall
        assert young_seconds(stall, mtbf * factor) > young_seconds(stall, mtbf)
    else:
        assert daly_seconds(stall, mtbf) == mtbf


def test_the_limits_of_the_formulas() -> None:
    assert young_seconds(50.0, 10000.0) == pytest.approx(1000.0)
    assert daly_seconds(50.0, 10000.0) == pytest.approx(1000.0 * (1 + 0.05 / 3 + 0.0025 / 9) - 50.0)
    assert daly_seconds(0.0, HOUR) == young_seconds(0.0, HOUR) == 0.0
    assert daly_seconds(1.0, math.inf) == young_seconds(1.0, math.inf) == math.inf


# The outlook


@given(JOBS, FACTORS)
def test_whatever_gets_better_loses_no_more(job: PlannedJob, factor: float) -> None:
    assert_no_worse(replace(job, state_bytes=job.state_bytes / factor), job)
    assert_no_worse(replace(job, disk_bytes_per_second=job.disk_bytes_per_second * factor), job)
    assert_no_worse(replace(job, bucket_bytes_per_second=job.bucket_bytes_per_second * factor), job)
    assert_no_worse(replace(job, node_mtbf_seconds=(job.node_mtbf_seconds or 0) * factor), job)
    assert_no_worse(replace(job, stall_seconds=job.stall_seconds / factor), job)
    assert_no_worse(replace(job, restart_seconds=job.restart_seconds / factor), job)
    if job.network_bytes_per_second is not None:
        assert_no_worse(replace(job, network_bytes_per_second=job.network_bytes_per_second * factor), job)
    if job.job_mtbf_seconds is not None:
        assert_no_worse(replace(job, job_mtbf_seconds=job.job_mtbf_seconds * factor), job)


@given(JOBS)
def test_what_holds_for_every_job(job: PlannedJob) -> None:
    found = outlooks(job)
    assert [each.copies for each in found] == [0, 1, 2][
        : 2 + (job.num_nodes > 1 and bool(job.network_bytes_per_second))
    ]
    shares = [each.answered_share for each in found]
    assert shares[0] == 0.0
    assert all(0 <= share <= 1 + 1e-9 for share in shares)
    assert all(later >= earlier - 1e-9 for earlier, later in pairwise(shares))
    for each in found:
        assert each.interval_seconds >= max(each.complete_seconds, job.step_seconds)
        assert each.durable_seconds >= max(job.bucket_seconds, each.interval_seconds) * (1 - 1e-9)
        assert (each.interval_steps - 1) * job.step_seconds < each.interval_seconds
        assert each.interval_seconds <= each.interval_steps * job.step_seconds * (1 + 1e-6)
        assert 0 < each.lost_seconds_per_day <= DAY_SECONDS
        assert each.disk_bytes_per_node == pytest.approx(each.copies * (job.keep + 3) * job.state_bytes / job.num_nodes)
        assert each.bucket_bytes >= (job.bucket_keep + 1) * job.state_bytes
        losses = (each.answered_loss_seconds, each.other_loss_seconds)
        mean = losses[0] * each.answered_share + losses[1] * (1 - each.answered_share)
        if each.lost_seconds_per_day < DAY_SECONDS:
            whole = each.failures_per_day * mean + each.stalled_seconds_per_day
            assert each.lost_seconds_per_day == pytest.approx(whole, rel=1e-6)


@given(JOBS, FACTORS)
def test_a_clock_of_another_rate_changes_nothing(job: PlannedJob, factor: float) -> None:
    def scaled(name: str) -> float | None:
        value = getattr(job, name)
        return None if value is None else value / factor if name.endswith("_per_second") else value * factor

    times = {name: scaled(name) for name in PlannedJob.__slots__ if name.endswith("_seconds") or "per_second" in name}
    for one, other in zip(outlooks(job), outlooks(replace(job, **times)), strict=True):
        assert other.interval_seconds == pytest.approx(one.interval_seconds * factor, rel=1e-6)
        assert other.lost_seconds_per_day == pytest.approx(one.lost_seconds_per_day, rel=1e-6)
        assert other.decided_by == one.decided_by
        assert other.bucket_bytes == pytest.approx(one.bucket_bytes, abs=job.state_bytes * 1.001)


def test_which_failures_the_nodes_answer() -> None:
    def shares(**changed: float | None) -> list[float]:
        return [each.answered_share for each in outlooks(replace(JOB, **changed))]

    of_job, of_nodes = 1 / 48, 64 / 3000
    total = of_job + of_nodes
    found = shares()
    assert found[:2] == pytest.approx([0.0, of_job / total])
    both_lost = found[2] - (of_job + of_nodes * 0.95) / total
    assert -0.001 < both_lost < 0  # a partner that is lost within these minutes
    assert shares(several_nodes_share=1.0) == pytest.approx([0, of_job / total, of_job / total])
    assert shares(several_nodes_share=0.0, disk_survives_share=1.0) == pytest.approx([0, 1, 1])
    assert shares(job_mtbf_seconds=None) == pytest.approx([0, 0, 0.95], abs=0.001)
    assert shares(job_mtbf_seconds=None, several_nodes_share=1.0) == [0, 0, 0]
    assert shares(num_nodes=1) == pytest.approx([0, 3000 / (3000 + 48)])
    assert len(shares(network_bytes_per_second=None)) == 2


def test_saves_that_answer_nothing_are_as_frequent_as_the_bucket_can_take_them() -> None:
    alone, fast, _ = outlooks(replace(JOB, job_mtbf_seconds=None, several_nodes_share=1.0))
    assert (fast.mtbf_seconds, fast.decided_by) == (math.inf, "failures")
    assert fast.interval_seconds == alone.interval_seconds
    assert fast.lost_seconds_per_day == pytest.approx(alone.lost_seconds_per_day, rel=0.02)
    slow = replace(JOB, job_mtbf_seconds=None, several_nodes_share=1.0, bucket_total_bytes_per_second=1e8)
    assert [each.decided_by for each in outlooks(slow)] == ["save", "drain", "drain"]


@pytest.mark.parametrize(
    "changed",
    [
        {"num_nodes": 0},
        {"num_nodes": 1.5},
        {"state_bytes": 0.0},
        {"disk_bytes_per_second": math.inf},
        {"bucket_total_bytes_per_second": 0.0},
        {"stall_seconds": -1.0},
        {"step_seconds": 0.0},
        {"several_nodes_share": 1.1},
        {"keep": True},
        {"node_mtbf_seconds": None, "job_mtbf_seconds": None},
    ],
)
def test_what_cannot_be_is_refused(changed: dict[str, float | None]) -> None:
    with pytest.raises(InvalidInput):
        replace(JOB, **changed)


# The same job, minute by minute


def simulated_loss(job: PlannedJob, outlook: Outlook, chance: random.Random, days: int) -> float:
    """The lost share of a job that saves as planned, failure by failure; failures of nodes cost their disks."""
    now = trained = 0.0
    of_node, of_job = job.num_nodes / (job.node_mtbf_seconds or math.inf), 1 / (job.job_mtbf_seconds or math.inf)
    period = outlook.interval_seconds + job.stall_seconds
    reloading = job.restart_seconds
    while now < days * DAY_SECONDS:
        until = chance.expovariate(of_node + of_job)
        is_answered = chance.random() < of_job / (of_node + of_job) and outlook.copies == 1
        training = max(0.0, until - reloading)
        saves = int(training // period)
        if is_answered:
            usable = [number for number in range(saves + 1) if number * period + outlook.complete_seconds <= training]
            kept = len(usable) - 1 if usable else 0
            load = job.bytes_per_node / job.disk_bytes_per_second
        else:
            drained = -math.inf
            kept = 0
            for number in range(1, saves + 1):  # one drains, and the newest that is complete is next
                begun = number * period + (outlook.complete_seconds if outlook.copies else 0.0)
                if begun >= drained:
                    drained = begun + job.bucket_seconds
                    kept = number if drained <= training else kept
            load = job.bucket_seconds
        trained += max(0, kept) * outlook.interval_seconds
        now += until
        reloading = job.restart_seconds + load
    return 1 - trained / now


def test_a_job_that_saves_as_planned_loses_what_the_plan_says() -> None:
    job = replace(JOB, several_nodes_share=0.0)
    for outlook in outlooks(job)[:2]:
        found = simulated_loss(job, outlook, random.Random(7), days=4000)
        assert found == pytest.approx(outlook.lost_seconds_per_day / DAY_SECONDS, rel=0.06)
