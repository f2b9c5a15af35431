"""The loop of the page for those who come from Ray Train goes on to the last bit, on two workers of which one dies."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from cluster import ROOT, RayCluster, fit
from frameworks import killed_once

import ckptstore

sys.path += [str(ROOT / "tests"), str(ROOT / "tests/docs")]  # of a worker, too

from test_recipes import END, block_after, with_chance

from ckptstore.testing.oracle import difference


def recipe(config: dict[str, Any]) -> None:
    """The loop of the page, killed once, and the same epochs in one go. Each worker has its own random numbers."""
    import torch
    from ray.train.torch import prepare_model

    setup, after = block_after("Ray Train")
    names = with_chance(setup)
    worker, build, train = ckptstore.ray.current_worker(), names["build"], names["train_epoch"]
    assert worker is not None
    made: list[Any] = []
    done = iter(range(END))

    def build_apart() -> Any:
        model, optimizer = build()
        torch.manual_seed(worker.rank)
        made[:] = prepare_model(model), optimizer
        return made

    def train_once(model: Any, optimizer: Any) -> Any:
        killed_once(config, next(done))
        return train(model, optimizer)

    def numbers() -> list[Any]:
        return [*(each.state_dict() for each in (*made, names["scheduler"])), torch.get_rng_state()]

    names |= {"build": build_apart, "train_epoch": train_once}
    loop = after.split("\n\n\nresult = ")[0].replace(", 2):", f", {END}):")
    exec(loop.replace("all_state(model, optimizer", "all_state(model, optimizer, scheduler"), names)
    names["train_after"]()
    assert next(done) == END - config["kill_at"]
    resumed = numbers()
    build_apart()
    for _ in range(END):
        train(*made)
    assert difference(resumed, numbers()) is None


@pytest.mark.slow
@pytest.mark.timeout(900)  # the workers start twice, on whatever is left of the machine
def test_the_recipe_of_the_page_goes_on_to_the_last_bit(cluster: RayCluster, tmp_path: Path) -> None:
    config = {"notes": str(tmp_path), "kill_at": 2}
    result = fit(recipe, storage_path=tmp_path, name="run", config=config, torch=True, max_failures=1)
    assert (tmp_path / "killed").exists()
    checkpoint = ckptstore.ray.resolve(result.checkpoint)
    assert checkpoint.step == END - 1
    first, second = checkpoint.per_rank("rng.torch")
    assert not first.equal(second)
