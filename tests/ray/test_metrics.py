"""Metrics that Ray's own bookkeeping can keep, write, read again and rank by; checked against that very code."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ray.train import Checkpoint, CheckpointConfig
from ray.train.v2._internal.execution.checkpoint.checkpoint_manager import CheckpointManager, _TrainingResultState
from ray.train.v2._internal.execution.storage import StorageContext
from ray.train.v2._internal.execution.training_report import _TrainingReport

from ckptstore import InvalidInput, InvalidMetric
from ckptstore.integrations.ray.metrics import REPLACED, Score, numbers_of, plain_metrics, safe_metrics

pytestmark = pytest.mark.slow

ORDERS = ("max", "min")

floats = st.floats(width=32)
scalars = st.one_of(
    floats,
    floats.map(np.float32),
    floats.map(np.float64),
    floats.map(np.array),
    floats.map(lambda value: torch.tensor(value, requires_grad=True)),
    st.integers(-(2**31), 2**31 - 1).map(np.int64),
    st.integers(),
    st.booleans(),
    st.booleans().map(np.bool_),
)
values = st.recursive(
    st.one_of(st.none(), scalars, st.text()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(min_size=1), inner, max_size=3)),
    max_leaves=8,
)
reports = st.dictionaries(st.text(min_size=1), values, max_size=4)
scores = st.one_of(scalars, st.none())


def written_and_read(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """As they come back after a restart of the run."""
    text = _TrainingResultState(checkpoint_dir_name="a", metrics=dict(metrics)).model_dump_json()
    return _TrainingResultState.model_validate_json(text).metrics


@given(reports)
def test_what_is_reported_comes_back_after_a_restart(metrics: dict[str, Any]) -> None:
    safe = plain_metrics(metrics)
    assert repr(written_and_read(safe)) == repr(without_non_finite(safe))


def without_non_finite(value: Any) -> Any:
    """Ray writes those as null."""
    if isinstance(value, dict):
        return {key: without_non_finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_non_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@given(reports.filter(lambda metrics: "score" not in metrics), st.one_of(st.just("missing"), scores))
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", ["score", "score/inner"])
def test_a_score_is_always_finite_and_says_what_it_was(name: str, order: Any, metrics: Any, score: Any) -> None:
    given_ = dict(metrics)
    if score != "missing":
        given_["score"] = {"inner": score} if "/" in name else score
    safe = safe_metrics(given_, score=Score(name, order))
    ray = manager(order, name)
    rank = ray._get_checkpoint_score(result(safe))
    assert rank == ray._get_checkpoint_score(result(written_and_read(safe)))
    assert rank[0]
    assert math.isfinite(rank[1])
    is_good = score not in ("missing", None) and math.isfinite(float_of(score))
    assert (REPLACED in safe) == (not is_good)
    worst = -sys.float_info.max
    assert rank[1] == (float_of(score) * (1 if order == "max" else -1) if is_good else worst)


def float_of(value: Any) -> float:
    try:
        return float(getattr(value, "item", lambda: value)())
    except OverflowError:
        return math.inf


def result(metrics: Mapping[str, Any]) -> Any:
    return _TrainingReport(checkpoint=Checkpoint("/nowhere"), metrics=dict(metrics), validation=False)


def manager(order: str, score: str) -> Any:
    """Ray's own keeper of checkpoints, of a run that is not there."""
    config = CheckpointConfig(num_to_keep=1, checkpoint_score_attribute=score, checkpoint_score_order=order)
    return CheckpointManager(config, StorageContext("/tmp", experiment_dir_name="ckptstore-no-such-run"))


@pytest.mark.parametrize(
    ("metrics", "reason"),
    [
        ({"a": np.zeros(2)}, "'a' is a ndarray"),
        ({"a": torch.zeros(2)}, "'a' is a Tensor"),
        ({"a": torch.zeros((), device="meta")}, "'a' has no value"),
        ({"a": {"b": [0, object()]}}, r"'a/b\[1\]' is a object"),
        ({"a": 1j}, "'a' is a complex"),
        ({"a": np.longdouble(1)}, "'a' is a longdouble"),
        ({"a": b"bytes"}, "'a' is a bytes"),
        ({1: 2}, "name 1 is not text"),
        ({"a": "\ud800"}, "not valid Unicode"),
        ("text", "metrics is a str"),
    ],
)
def test_what_ray_cannot_keep_is_refused_by_name(metrics: Any, reason: str) -> None:
    with pytest.raises(InvalidMetric, match=reason):
        plain_metrics(metrics)


def test_metrics_that_hold_themselves_are_refused() -> None:
    endless: dict[str, Any] = {}
    endless["a"] = endless
    with pytest.raises(InvalidMetric, match="holds itself"):
        plain_metrics(endless)


def test_a_score_must_be_a_number() -> None:
    with pytest.raises(InvalidMetric, match="is 'good', and Ray is to rank"):
        safe_metrics({"loss": "good"}, score=Score("loss", "min"))
    with pytest.raises(InvalidInput, match="order is 'down'"):
        Score("loss", "down")  # type: ignore[arg-type]


def test_a_score_too_large_for_a_float_is_the_worst() -> None:
    safe = safe_metrics({"loss": 10**400}, score=Score("loss", "min"))
    assert safe == {"loss": sys.float_info.max, REPLACED: {"loss": "Infinity"}}


def test_numbers_for_the_manifest_keep_what_was_measured() -> None:
    found = numbers_of({"loss": math.nan, "eval": {"top1": 0.5, "name": "digits"}, "curve": [1, 2], "none": None})
    assert repr(found) == "{'loss': nan, 'eval/top1': 0.5}"


@pytest.mark.parametrize("one", [np.array([0.5]), np.array([[0.5]]), torch.tensor([0.5]), torch.tensor([[0.5]])])
def test_one_element_is_its_number(one: Any) -> None:
    assert plain_metrics({"loss": one}) == {"loss": 0.5}


@pytest.mark.parametrize("large", [2**53 + 1, -(10**400)], ids=["odd", "huge"])
def test_no_number_for_the_manifest_is_changed(large: int) -> None:
    """The save refuses what no float has."""
    assert numbers_of({"tokens": large}) == {"tokens": large}
