"""A run of Ray Train that goes over from one way of keeping checkpoints to another goes on where it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cluster import RayCluster, fit
from keeping import note, notes

import ckptstore
from ckptstore import NoUsableCheckpoint


def train_one_more(config: dict[str, Any]) -> None:
    """Go on in the way of `config["reads"]` and keep one more step in the way of `config["keeps"]`."""
    import tempfile

    import ray.train
    import torch

    state = {"step": -1, "weight": torch.zeros(4)}
    store = ckptstore.ray.store(ignore_ray=config.get("ignore_ray", False))
    handed = ray.train.get_checkpoint()
    rank = ray.train.get_context().get_world_rank()
    try:
        if config["reads"] == "store":
            ckptstore.ray.resume(state, store, prefer=config.get("prefer", "newest"))
        elif config["reads"] == "wrap" and handed is not None:
            ckptstore.ray.wrap(handed).load(state)
    except ckptstore.CkptstoreError as error:
        note(config, "refused", f"{rank} {error.code}")
        return
    note(config, "resumed", f"{rank} {state['step']} {state['weight'].sum().item():.0f}")
    state["step"] += 1
    state["weight"] += 1
    if config["keeps"] == "store":
        store.save(state["step"], state)
    elif config["keeps"] == "report":
        ckptstore.ray.report({}, state=state, step=state["step"])
    else:
        with tempfile.TemporaryDirectory() as directory:
            torch.save(state, f"{directory}/state-{rank}.pt")
            ray.train.report({}, checkpoint=ray.train.Checkpoint.from_directory(directory))
    store.close()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_way_from_one_to_another_loses_a_step(cluster: RayCluster, tmp_path: Path) -> None:
    """In one run, whose name holds what URIs are cut at elsewhere."""
    ways = [
        ({"reads": "wrap", "keeps": "report"}, "-1 0"),
        ({"reads": "store", "keeps": "store"}, "0 4"),  # from report to a store
        ({"reads": "wrap", "keeps": "report"}, "1 8"),  # and back
        ({"reads": "store", "keeps": "store", "prefer": "ray"}, "2 12"),
        ({"reads": "store", "keeps": "ray"}, "3 16"),
        ({"reads": "store", "keeps": "store"}, None),  # what Ray stored itself
        ({"reads": "wrap", "keeps": "report"}, None),
        ({"reads": "store", "keeps": "store", "ignore_ray": True}, "3 16"),
    ]
    for number, (config, resumed) in enumerate(ways):
        told = tmp_path / str(number)
        fit(
            train_one_more,
            storage_path=tmp_path / "runs",
            name="exp#1 a%20b",
            config={"notes": str(told), **config},
            torch=True,
        )
        if resumed is None:
            codes = {NoUsableCheckpoint.code, ckptstore.InvalidSource.code}
            assert [line[1] in codes for line in notes(told, "refused")] == [True, True], number
        else:
            assert sorted(map(" ".join, notes(told, "resumed"))) == [f"0 {resumed}", f"1 {resumed}"], number
    assert sorted(item.name for item in (tmp_path / "runs").iterdir()) == ["exp#1 a%20b"]
