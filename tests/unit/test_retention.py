"""Retention is pure, so it is tested as such: what is kept, why, and that a dry run cannot differ from a run."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptstore.errors import InvalidInput, InvalidMetric
from ckptstore.retention import (
    Candidate,
    KeepAll,
    KeepAny,
    KeepBest,
    KeepEvery,
    KeepLatest,
    KeepSince,
    KeepWeights,
    KeepWithin,
    Mode,
    Policy,
    as_metrics,
    check_required,
    decide,
    mode_of,
    parse_policy,
    ranked,
)


def make(steps: list[int], losses: list[float] | None = None, *, every_seconds: float = 60.0) -> list[Candidate]:
    return [
        Candidate(
            number=10 + index,
            step=step,
            committed_at=1e9 + index * every_seconds,
            metrics={} if losses is None else {"loss": losses[index]},
        )
        for index, step in enumerate(steps)
    ]


def kept_steps(policy: Policy, candidates: list[Candidate], protected: dict[int, str] | None = None) -> list[int]:
    return [verdict.step for verdict in decide(policy, candidates, protected=protected or {}) if verdict.keep]


def test_the_latest_counts_as_one_of_the_latest() -> None:
    assert kept_steps(KeepLatest(2), make([1, 2, 3, 4])) == [3, 4]


def test_best_ranks_finite_values_only_and_later_ones_first_among_equals() -> None:
    losses = [0.5, math.nan, 0.5, -math.inf, 0.7, math.inf]
    candidates = make([1, 2, 3, 4, 5, 6], losses)
    assert kept_steps(KeepBest(1, metric="loss", mode="min"), candidates) == [3]
    assert kept_steps(KeepBest(2, metric="loss", mode="max"), candidates) == [3, 5]
    assert kept_steps(KeepBest(9, metric="loss"), candidates) == [1, 3, 5]


def test_a_missing_metric_is_never_best_under_min() -> None:
    with_loss, without = make([1], [0.5]), make([1, 2])[1:]
    assert kept_steps(KeepBest(1, metric="loss", mode="min"), [*with_loss, *without]) == [1]


def test_every_keeps_the_first_of_each_interval() -> None:
    assert kept_steps(KeepEvery(steps=100), make([0, 50, 100, 150, 320])) == [0, 100, 320]
    by_time = make([1, 2, 3, 4], every_seconds=1800)
    assert len(kept_steps(KeepEvery(seconds=3600), by_time)) in (2, 3)


def test_since_counts_back_from_the_newest() -> None:
    assert kept_steps(KeepSince(60), make([1, 2, 3])) == [2, 3]


def test_union_keeps_what_any_member_keeps_and_says_all_reasons() -> None:
    policy = KeepBest(1, metric="loss") | KeepLatest(1) | KeepEvery(steps=10)
    verdicts = decide(policy, make([0, 5, 10, 15], [0.1, 0.9, 0.8, 0.7]), protected={11: "pinned"})
    assert [verdict.step for verdict in verdicts if verdict.keep] == [0, 5, 10, 15]
    assert verdicts[0].reason == "one of the best 1 by loss (min); the first of its 10 steps"
    assert verdicts[1].reason == "pinned"
    assert KeepBest(1, "loss").required_metrics() == policy.required_metrics() == {"loss"}


def test_what_nobody_keeps_is_dropped_with_a_reason() -> None:
    verdicts = decide(KeepLatest(1), make([1, 2]), protected={})
    assert [(verdict.keep, verdict.reason) for verdict in verdicts] == [
        (False, "no rule keeps it"),
        (True, "one of the latest 1"),
    ]


candidate_lists = st.lists(
    st.tuples(st.integers(0, 500), st.none() | st.floats(allow_nan=True, allow_infinity=True)), max_size=30
).map(
    lambda rows: [
        Candidate(
            number=index + 1, step=step, committed_at=1e9 + 37.0 * index, metrics={} if loss is None else {"loss": loss}
        )
        for index, (step, loss) in enumerate(rows)
    ]
)
policies = st.recursive(
    st.builds(KeepLatest, st.integers(1, 5))
    | st.builds(KeepBest, st.integers(1, 5), st.just("loss"), st.sampled_from(["min", "max"]))
    | st.builds(KeepEvery, steps=st.integers(1, 100))
    | st.builds(KeepSince, st.floats(1, 1000))
    | st.just(KeepAll()),
    lambda inner: st.builds(lambda a, b: a | b, inner, inner),
    max_leaves=4,
)


@given(policies, candidate_lists)
def test_every_candidate_gets_one_verdict_with_a_reason(policy: Policy, candidates: list[Candidate]) -> None:
    verdicts = decide(policy, candidates, protected={})
    assert [verdict.number for verdict in verdicts] == [candidate.number for candidate in candidates]
    assert all(verdict.reason for verdict in verdicts)
    assert decide(policy, list(reversed(candidates)), protected={}) == verdicts


@given(policies, candidate_lists)
def test_dropping_and_deciding_again_drops_nothing_more(policy: Policy, candidates: list[Candidate]) -> None:
    kept = {verdict.number for verdict in decide(policy, candidates, protected={}) if verdict.keep}
    left = [candidate for candidate in candidates if candidate.number in kept]
    assert all(verdict.keep for verdict in decide(policy, left, protected={}))


@given(policies, policies, candidate_lists)
def test_a_union_keeps_exactly_the_union(one: Policy, two: Policy, candidates: list[Candidate]) -> None:
    def kept(policy: Policy) -> set[int]:
        return {verdict.number for verdict in decide(policy, candidates, protected={}) if verdict.keep}

    assert kept(one | two) == kept(one) | kept(two)


@given(candidate_lists, st.sampled_from(["min", "max"]))
def test_ranking_has_finite_values_in_order(candidates: list[Candidate], mode: str) -> None:
    values = [candidate.metrics["loss"] for candidate in ranked(candidates, "loss", mode)]  # type: ignore[arg-type]
    assert values == sorted(values, reverse=mode == "max")
    assert len(values) == sum(math.isfinite(candidate.metrics.get("loss", math.nan)) for candidate in candidates)


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("huge", [10**400, -(10**400)])
def test_an_integer_beyond_all_floats_is_never_among_the_best(huge: int, mode: Mode) -> None:
    candidates = make([1, 2, 3], [0.5, huge, 0.25])
    assert sorted(candidate.step for candidate in ranked(candidates, "loss", mode)) == [1, 3]
    assert {
        verdict.step for verdict in decide(KeepBest(3, "loss", mode), candidates, protected={}) if verdict.keep
    } == {1, 3}


@pytest.mark.parametrize(
    "build",
    [
        lambda: KeepLatest(0),
        lambda: KeepLatest(True),
        lambda: KeepLatest(2.0),  # type: ignore[arg-type]
        lambda: KeepBest(math.inf, "loss"),  # type: ignore[arg-type]
        lambda: KeepBest(-1, "loss"),
        lambda: KeepBest(1, "loss", "best"),  # type: ignore[arg-type]
        lambda: KeepEvery(),
        lambda: KeepEvery(steps=1, seconds=1),
        lambda: KeepEvery(steps=0),
        lambda: KeepSince(0),
    ],
)
def test_impossible_policies_are_refused(build: object) -> None:
    with pytest.raises(InvalidInput):
        build()  # type: ignore[operator]


def test_scalars_of_python_numpy_and_torch_become_floats() -> None:
    import torch

    given_metrics = {
        "int": 3,
        "numpy": np.float32(0.5),
        "array": np.array(2.0),
        "tensor": torch.tensor(0.25),
        "bf16": torch.tensor([1.5], dtype=torch.bfloat16),
        "fraction": Fraction(1, 2),
        "nan": math.nan,
    }
    found = as_metrics(given_metrics)
    assert all(type(value) is float for value in found.values())
    assert found.pop("nan") != found.get("nan")
    expected = {"int": 3.0, "numpy": 0.5, "array": 2.0, "tensor": 0.25, "bf16": 1.5, "fraction": 0.5}
    assert found == expected
    assert as_metrics(None) == {}


@pytest.mark.parametrize(
    "metrics",
    [
        {"n": 2**53 + 1},
        {"n": np.int64(2**53 + 1)},
        {"n": 2**1100},
        {"loss": "0.1"},
        {"loss": None},
        {"loss": 1j},
        {"loss": np.zeros(2)},
        {3: 1.0},
        {"": 1.0},
        [1.0],
    ],
)
def test_what_is_not_a_number_is_refused(metrics: object) -> None:
    with pytest.raises(InvalidMetric):
        as_metrics(metrics)  # type: ignore[arg-type]


def test_a_metric_that_retention_needs_must_be_there() -> None:
    policy = KeepBest(1, "loss") | KeepLatest(1)
    with pytest.raises(InvalidMetric, match="'loss'"):
        check_required(policy, {"accuracy": 1.0}, missing="error")
    check_required(policy, {"accuracy": 1.0}, missing="worst")
    check_required(policy, {"loss": math.nan}, missing="error")


@pytest.mark.parametrize(
    ("metric", "mode"),
    [
        ("loss", "min"),
        ("val/loss", "min"),
        ("eval_Loss", "min"),
        ("top5-acc", "max"),
        ("val_f1", "max"),
        ("PPL", "min"),
    ],
)
def test_the_name_of_a_metric_may_tell_its_direction(metric: str, mode: str) -> None:
    assert KeepBest(1, metric).mode == mode_of(metric, None) == mode
    assert KeepBest(1, metric, "max").mode == "max"


@pytest.mark.parametrize("metric", ["score", "lossless", "loss_of_accuracy", "", "accurate"])
def test_a_metric_whose_name_tells_no_direction_needs_a_mode(metric: str) -> None:
    with pytest.raises(InvalidInput, match='mode="min" or mode="max"'):
        KeepBest(1, metric)
    assert KeepBest(1, metric, "max").mode == "max"


SIZES = st.lists(st.tuples(st.integers(0, 40), st.sets(st.integers(0, 5), max_size=2)), max_size=9)


def sized(sizes: list[tuple[int, set[int]]]) -> list[Candidate]:
    """Checkpoints of these sizes, which refer to files of some before them."""
    found: list[Candidate] = []
    for at, (size_bytes, bases) in enumerate(sizes):
        holds = {10 + at: size_bytes, **{10 + base: sizes[base][0] for base in bases if base < at}}
        found.append(Candidate(number=10 + at, step=at, committed_at=0.0, metrics={}, holds=holds))
    return found


def held_bytes(candidates: list[Candidate], numbers: set[int]) -> int:
    held: dict[int, int] = {}
    for item in candidates:
        held |= item.holds if item.number in numbers else {}
    return sum(held.values())


@given(SIZES, st.integers(1, 120), st.sets(st.integers(0, 8)), st.integers(1, 9))
def test_a_budget_keeps_the_newest_that_fit(
    sizes: list[tuple[int, set[int]]], budget: int, pinned: set[int], latest: int
) -> None:
    candidates = sized(sizes)
    numbers = [item.number for item in candidates]
    protected = {number: "pinned" for number in numbers if number - 10 in pinned} | dict.fromkeys(
        numbers[-1:], "latest"
    )
    inner = KeepLatest(latest) | KeepEvery(steps=3)
    verdicts = decide(inner & KeepWithin(budget), candidates, protected=protected)
    stays = {verdict.number for verdict in verdicts if verdict.keep}
    wanted = {verdict.number for verdict in decide(inner, candidates, protected=protected) if verdict.keep}
    assert protected.keys() <= stays <= wanted
    extra = sorted(stays - protected.keys())
    assert not extra or held_bytes(candidates, stays) <= budget
    gone = sorted(wanted - stays)
    assert not gone or not extra or gone[-1] < extra[0], "the oldest go first"
    if gone:
        assert held_bytes(candidates, stays | {gone[-1]}) > budget, "and none that fits"
    for verdict in verdicts:
        assert (verdict.reason == f"over the budget of {budget}") == (verdict.number in gone)
    again = [item for item in candidates if item.number in stays]
    assert all(verdict.keep for verdict in decide(KeepWithin(budget), again, protected=protected)) or len(again) == 0


def test_budgets_are_written_as_sizes_and_joined_by_and() -> None:
    assert KeepWithin("2TB").budget_bytes == 2e12
    assert KeepWithin("1.5 TiB").budget_bytes == 1.5 * 2**40
    assert parse_policy("latest=3 every=10 within=2TB") == (KeepLatest(3) | KeepEvery(steps=10)) & KeepWithin("2TB")
    assert parse_policy(["within=5GB"]) == KeepWithin("5GB")
    assert (KeepBest(1, "loss") & KeepWithin(1)).required_metrics() == {"loss"}
    assert KeepWithin(1).compares_times() is False
    wrong = [
        lambda: KeepWithin("2"),
        lambda: KeepWithin("TB"),
        lambda: KeepWithin(0),
        lambda: KeepWithin("0TB"),
        lambda: KeepWithin(True),
        lambda: KeepLatest(1) | KeepWithin("2TB"),
        lambda: KeepWithin("2TB") | KeepLatest(1),
        lambda: KeepLatest(1) & KeepLatest(2),
        lambda: KeepLatest(1) & (KeepLatest(2) & KeepWithin("2TB")),
        lambda: parse_policy("within=2TB within=3TB"),
        lambda: parse_policy("within="),
    ]
    for build in wrong:
        with pytest.raises(InvalidInput):
            build()


def test_rules_in_words() -> None:
    assert parse_policy([]) is None
    assert parse_policy(["latest=3"]) == KeepLatest(3)
    assert parse_policy(["best=2:eval_loss"]) == KeepBest(2, "eval_loss", "min")
    assert parse_policy(["best=2:a:b:max"]) == KeepBest(2, "a:b", "max")
    both = KeepAny((KeepEvery(steps=100), KeepSince(3600.0)))
    for rules in (["every=100", "since=1h"], ["every=100 since=1h"], "every=100 since=1h", "every=100, since=1h"):
        assert parse_policy(rules) == both
    assert parse_policy(" ") is None
    assert parse_policy("latest=1 best=2:my loss, all") == KeepAny((KeepLatest(1), KeepBest(2, "my loss, all")))


@pytest.mark.parametrize(
    "rule",
    [
        *("", "latest", "latest=", "latest=x", "latest=0", "latest=3:x"),
        *("best=2", "best=x:y", "best=0:loss", "best=1:zzz", "worst=1", "since=1y"),
    ],
)
def test_words_that_are_no_rule_are_refused(rule: str) -> None:
    with pytest.raises(InvalidInput):
        parse_policy([rule])


def test_weights_are_kept_of_what_no_other_rule_keeps_whole() -> None:
    rules = parse_policy("latest=2 weights:every=10, best=1:loss:min weights:latest=4")
    assert rules == KeepLatest(2) | KeepWeights(KeepEvery(steps=10)) | KeepBest(1, "loss", "min") | KeepWeights(
        KeepLatest(4)
    )
    assert rules is not None
    assert (rules.thins(), KeepLatest(2).thins()) == (("optimizer*",), ())
    found = decide(rules, make(list(range(0, 50, 5)), [9, 1, *[5] * 8]), protected={14: "pinned"})
    whole = [verdict.step for verdict in found if verdict.keep and not verdict.drops]
    assert (whole, [verdict.step for verdict in found if verdict.drops]) == ([5, 20, 40, 45], [0, 10, 30, 35])
    assert [verdict.step for verdict in found if not verdict.keep] == [15, 25]


def test_two_rules_drop_what_neither_needs() -> None:
    rules = KeepWeights(KeepLatest(1), drop=("ema*", "optimizer*")) | KeepWeights(KeepAll(), drop="optimizer*")
    assert [verdict.drops for verdict in decide(rules, make([1, 2]), protected={})] == [("optimizer*",)] * 2
    assert rules.thins() == ("ema*", "optimizer*")


def test_a_budget_counts_what_is_about_to_be_thinned_with_the_share_that_is_left() -> None:
    def made(number: int, size_bytes: int, **fields: Any) -> Candidate:
        return Candidate(number=number, step=number, committed_at=0.0, metrics={}, holds={number: size_bytes}, **fields)

    def kept(items: list[Candidate], budget: int) -> list[int]:
        rules = (KeepLatest(1) | KeepWeights(KeepAll())) & KeepWithin(budget)
        assert rules.thins() == ("optimizer*",)
        return [verdict.number for verdict in decide(rules, items, protected={9: "the latest"}) if verdict.keep]

    whole = [made(number, 100, can_thin=True) for number in (6, 7, 8, 9)]
    done = made(10, 20, whole=5, dropped=("optimizer*",), left_share=0.2)
    assert kept(whole, 100) == [6, 7, 8, 9], "nobody knows yet what is left of them"
    assert kept([done, *whole], 180) == [10, 6, 7, 8, 9]
    assert kept([done, *whole], 179) == [6, 7, 8, 9]
    assert kept([done, *whole], 139) == [8, 9]
    assert kept([done, *whole], 100) == [9]
    stuck = [made(8, 100, can_thin=False) if item.number == 8 else item for item in whole]
    assert kept([done, *stuck], 199) == [9], "what cannot be thinned takes all that it has"
    assert kept([done, *stuck], 220) == [7, 8, 9]
    other = made(10, 20, whole=5, dropped=("ema*",), left_share=0.2, can_thin=True)
    assert kept([other, *whole], 164) == [10, 6, 7, 8, 9], "by other patterns"


def test_a_budget_is_for_all_that_stays() -> None:
    assert parse_policy("latest=1 weights:every=5 within=2TB") == (
        KeepLatest(1) | KeepWeights(KeepEvery(steps=5))
    ) & KeepWithin("2TB")
    for rules in (lambda: KeepWeights(KeepWithin("2TB")), lambda: parse_policy("latest=1 weights:within=2TB")):
        with pytest.raises(InvalidInput, match="takes a rule without a budget"):
            rules()


@pytest.mark.parametrize("drop", ["", (), ("optimizer*", "")])
def test_a_rule_without_a_pattern_is_refused(drop: str | tuple[str, ...]) -> None:
    with pytest.raises(InvalidInput, match="it must be one or several patterns"):
        KeepWeights(KeepLatest(1), drop=drop)
    with pytest.raises(InvalidInput, match="keeps checkpoints whole"):
        KeepWeights(KeepLatest(1) | KeepWeights(KeepAll()))
