"""What the guides to Ray Train show runs with ckptstore, in both contracts, and the page says how many lines change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import patterns
import pytest
import ray.train
import torch
from cluster import ROOT, RayCluster, fit

import ckptstore

pytestmark = pytest.mark.slow

GUIDES = pytest.param("before", marks=pytest.mark.long)
"""As the guides have it, to show that the patterns are theirs."""


def steps_of(result: Any, how: str) -> list[int]:
    opened = ckptstore.ray.wrap if how == "report" else ckptstore.ray.resolve
    checkpoints = [opened(checkpoint) for checkpoint, _ in result.best_checkpoints]
    assert all(checkpoint.verify().ok for checkpoint in checkpoints)
    return [checkpoint.step for checkpoint in checkpoints]


def never_failed() -> Any:
    """The model of four epochs in one go, of one process."""
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(4):
        patterns.train_epoch(model, optimizer)
    return model


def test_the_page_says_how_many_lines_change() -> None:
    page = (ROOT / "docs/how-to/ray-train.md").read_text()
    assert patterns.table() in page, f"the page has to have this table:\n{patterns.table()}"


@pytest.mark.parametrize("how", ["report", pytest.param("store", marks=pytest.mark.long), GUIDES])
def test_patterns_that_start_from_nothing(cluster: RayCluster, tmp_path: Path, how: str) -> None:
    result = fit(patterns.one_after_another, storage_path=tmp_path, name=how, config={"how": how}, torch=True)
    assert len(result.best_checkpoints) == 2 + 2 + 1
    if how != "before":
        assert steps_of(result, how) == ([1, 2, 5, 8, 9] if how == "report" else [0, 1, 12, 15, 20])
    assert getattr(patterns, f"after_{how}")(result).tolist() == [1, 1, 1]


@pytest.mark.long
@pytest.mark.timeout(600)  # the workers start twice, on whatever is left of the machine
@pytest.mark.parametrize(("how", "by"), [("report", "ray"), ("store", "trainer"), ("before", "ray")])
def test_patterns_that_go_on_after_a_failure(cluster: RayCluster, tmp_path: Path, how: str, by: str) -> None:
    """By Ray itself, or by a trainer of the same name.

    Ray may lose what a worker reported just before it failed. Where Ray keeps, the epoch is then trained, and fails,
    again; else Ray does not know of a checkpoint that the store has.
    """
    run: dict[str, Any] = {"storage_path": tmp_path, "name": how, "torch": True}
    train = getattr(patterns, f"resumed_{how}")
    if by == "trainer":
        with pytest.raises(ray.train.TrainingFailedError, match="Intentional error"):
            fit(train, **run)
    result = fit(train, max_failures=5 if by == "ray" else 0, **run)
    assert result.metrics["start"] == 2, "it went on from the epoch that failed"
    if how != "store":
        assert len(result.best_checkpoints) == 4
    else:
        assert {0, 2, 3} <= set(steps_of(result, how))
        with ckptstore.open_store(tmp_path / how / "_ckptstore") as store:
            assert [checkpoint.step for checkpoint in store] == [0, 1, 2, 3]
        again = fit(train, **run)
        assert again.checkpoint.path == result.checkpoint.path, "there was nothing left to do"
    model = getattr(patterns, f"served_{how}")(result.checkpoint)
    assert model.weight.item() == pytest.approx(never_failed().weight.item()), "the optimizer's state was there too"
