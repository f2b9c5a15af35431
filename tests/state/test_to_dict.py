"""A state comes back as the nested dict that was saved, without one to load into, or is refused by key."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from meshes import distributed, mesh_for, new_uri
from thread_ranks import run_threads
from torch.distributed.tensor import Shard
from torch.testing._internal.two_tensor import TwoTensor

from ckptstore import Checkpoint, CheckpointStore, InvalidInput, InvalidState, StateMismatch, open_store


def test_a_training_state_comes_back_nested_with_its_ties() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    plain = {"epoch": 3, "pair": (1, [2, {"x": torch.ones(2)}]), "a.b": {7: "seven"}}
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, **plain}
    state |= {
        "loss": torch.nn.MSELoss(),
        "ema": {"w": model[0].weight, "decay": 0.9},
        "nets": [model[1], {"deep": {"er": model[0]}}],
    }
    with open_store(new_uri()) as store, torch.inference_mode():
        found = store.save(1, state).to_dict()
    assert found.keys() == state.keys()
    assert found["model"].keys() == model.state_dict().keys()
    assert all(torch.equal(found["model"][key], value) for key, value in model.state_dict().items())
    assert found["ema"]["w"] is found["model"]["0.weight"] is found["nets"][1]["deep"]["er"]["weight"]
    assert found["ema"]["decay"] == 0.9
    assert found["nets"][0]["bias"] is found["model"]["1.bias"]
    assert found["scheduler"] == scheduler.state_dict()
    momentum = optimizer.state[model[1].weight]["exp_avg"]
    assert torch.equal(found["optimizer"]["state.model.1.weight.exp_avg"], momentum)
    assert found["optimizer"]["param_groups.model.1.weight.lr"] == 0.5
    assert (found["epoch"], found["pair"][0], found["a.b"]) == (3, 1, {7: "seven"})
    assert torch.equal(found["pair"][1][1]["x"], torch.ones(2))
    assert not found["model"]["0.weight"].is_inference(), "one may train on from it"


def saved_by_two(state: Any) -> Checkpoint:
    uri = new_uri()

    def flow(store: CheckpointStore, rank: int) -> None:
        store.save(1, state(rank))

    assert run_threads(2, uri, flow) == [None] * 2
    return open_store(uri)[1]


def test_what_ranks_had_in_parts_is_whole_and_what_they_had_apart_is_asked_for() -> None:
    full = torch.arange(15.0).reshape(5, 3)
    layer = torch.nn.Linear(1, 1)
    checkpoint = saved_by_two(
        lambda rank: {
            "w": distributed(full, mesh_for(rank, [0, 1]), [Shard(0)]),
            "own": {"rng": rank},
            "epoch": 4,
            "nets": {0: layer} if rank else [layer],
        }
    )
    with pytest.raises(StateMismatch, match=r"2 ranks that saved had its own own.*per_rank=\"first\""):
        checkpoint.to_dict()
    found = checkpoint.to_dict(per_rank={"own*": "first"})
    assert type(found["w"]) is torch.Tensor
    assert torch.equal(found.pop("w"), full)
    assert type(found.pop("nets")) is list, "the first rank decides what a key stands for"
    assert found == {"own": {"rng": 0}, "epoch": 4}
    assert checkpoint.to_dict(include=["epoch"], per_rank="error") == {"epoch": 4}, "nobody asked for the others"
    assert checkpoint.to_dict(per_rank="skip").keys() == {"w", "epoch", "nets"}


class Count(enum.IntEnum):
    SEVEN = 7


NUMBERS = {np.int64(3): 3, np.float64(2.5): 2.5, -4: -4, Count.SEVEN: 7, True: True, np.float32(0.1): "0.1"}
"""Keys, and as what they come back: numbers as Python's own, what is no longer the same as text."""


@pytest.mark.parametrize("how", [{}, {"stock_readable": False}, {"incremental": True}, {"incremental": "reference"}])
def test_dicts_and_lists_of_objects_come_back_however_they_were_saved(how: dict[str, Any]) -> None:
    keys = (0, 1, None, 2.5, "a.b", ("t", 1))
    state = {
        "by key": {key: torch.nn.BatchNorm1d(2) for key in keys},
        "listed": [torch.nn.Sequential(torch.nn.Linear(2, 2)), {"deep": {3: torch.nn.Linear(1, 1)}, "x": {4: {5}}}, 8],
        "numbers": {key: torch.nn.Linear(1, 1) for key in NUMBERS},
        "dict.of": {"tensors": {0: torch.ones(2), 1: torch.zeros(2)}, "sets": {(1, 2): {3, "x"}}},
    }
    with open_store(new_uri()) as store:
        store.save(1, state, incremental=bool(how.get("incremental", False)))
        checkpoint = store.save(2, state, **how)
        found, part = checkpoint.to_dict(), checkpoint.to_dict(include="listed.1.deep.*")
    assert set(found["by key"]) == {0, 1, None, 2.5, "a.b", "('t', 1)"}
    for key, module in state["by key"].items():
        mine = found["by key"][key if type(key) is not tuple else str(key)]
        assert {name: item.tolist() for name, item in mine.items()} == {
            name: item.tolist() for name, item in module.state_dict().items()
        }
    assert {(type(key), key) for key in found["numbers"]} == {(type(key), key) for key in NUMBERS.values()}
    assert list(found["listed"][0]) == ["0.bias", "0.weight"]
    assert list(found["listed"][1]["deep"]) == [3]
    assert found["listed"][1]["x"] == {4: {5}}
    assert part["listed"].keys() == {1}, "no list without its first item"
    assert found["listed"][2] == 8
    assert list(found["dict.of"]["tensors"]) == [0, 1]
    assert found["dict.of"]["sets"] == {(1, 2): {3, "x"}}


def test_what_cannot_be_told_is_refused_by_key(tmp_path: Path) -> None:
    with open_store(new_uri()) as store:
        flat = store.save(1, {"model": {"w": torch.ones(1)}, "n": 5})
        assert flat.to_dict(include="n") == {"n": 5}
        with pytest.raises(InvalidInput, match=r"include='modle\.\*' fits no key.*'model\.\*'"):
            flat.to_dict(include="modle.*")
        pickled = store.save(2, {"n": 5, "odd": {"kind": Path}}, allow_pickle=True)
        with pytest.raises(InvalidState, match=r"odd is a pickle.*include="):
            pickled.to_dict()
        assert pickled.to_dict(include="n") == {"n": 5}
        wrapped = store.save(3, {"n": 5, "deep": [{"w": TwoTensor(torch.ones(2), torch.ones(2))}]})
        with pytest.raises(InvalidState, match=r"deep.*TwoTensor is stored as the tensors it is made of"):
            wrapped.to_dict()
        assert wrapped.to_dict(include="n") == {"n": 5}
        (tmp_path / "files").mkdir()
        with pytest.raises(InvalidInput, match="has no state"):
            store.save_directory(4, tmp_path / "files").to_dict()


def test_a_directory_of_stock_dcp_is_read_too(tmp_path: Path) -> None:
    dcp.save({"model": {"w": torch.ones(2)}, "list": [1, {"x": 2}]}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    found = Checkpoint.from_directory(tmp_path / "dcp").to_dict()
    assert torch.equal(found["model"].pop("w"), torch.ones(2))
    assert found == {"model": {}, "list": [1, {"x": 2}]}
