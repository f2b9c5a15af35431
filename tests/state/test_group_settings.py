"""Settings that parameters of several groups were saved with, where one group takes them now."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn, optim

from ckptstore import CheckpointStore, StateMismatch, open_store
from ckptstore.state.read.stored import StoredState

NAN = float("nan")


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


def saved(path: Path, setting: str, first: Any, second: Any) -> CheckpointStore:
    """A store in which the two layers have groups of their own."""
    layers = model()
    groups = [{"params": layers[0].parameters(), setting: first}, {"params": layers[1].parameters(), setting: second}]
    store = open_store(path, durable=False)
    store.save(1, {"model": layers, "optimizer": optim.AdamW(groups)})
    return store


def one_group(setting: str, value: Any) -> dict[str, Any]:
    layers = model()
    layers.get_parameter("0.weight").data.zero_()
    return {"model": layers, "optimizer": optim.AdamW([{"params": list(layers.parameters()), setting: value}])}


@pytest.mark.parametrize(
    ("setting", "first", "second", "words"),
    [
        ("lr", torch.tensor(0.1), torch.tensor(0.001), "has other numbers in the checkpoint than"),
        ("lr", torch.tensor(0.1), torch.tensor(0.1, dtype=torch.float64), r"is float64 \[\] in the checkpoint"),
        ("lr", torch.tensor(0.1), torch.tensor([0.1]), r"is float32 \[1\] in the checkpoint"),
        ("lr", torch.tensor(0.1), 0.1, "is 0.1 in the checkpoint"),
        ("lr", 0.1, torch.tensor(0.1), r"is float32 \[\] in the checkpoint"),
        ("betas", (torch.tensor(0.9), torch.tensor(0.99)), (torch.tensor(0.9), torch.tensor(0.98)), "other numbers"),
        ("own", {"a": [torch.ones(600)]}, {"a": [torch.zeros(600)]}, r"than optimizer.*weight\.own\.a\.0"),
        ("own", NAN, 0.0, "is 0.0 in the checkpoint"),
        ("own", np.array([1, 2]), np.array([1, 3]), r"is array\(\[1, 3\]\)"),
    ],
)
def test_other_values_are_refused_before_anything_is_changed(
    tmp_path: Path, setting: str, first: Any, second: Any, words: str
) -> None:
    state = one_group(setting, first)
    with saved(tmp_path, setting, first, second) as store:
        for load in (store.load, store.resume):
            with pytest.raises(StateMismatch, match=rf"param_groups\.model\.1\.weight\.{setting} .*{words}"):
                load(state)
    assert not state["model"][0].weight.any()


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("lr", torch.tensor(0.1)),
        ("lr", torch.tensor(NAN)),
        ("betas", (torch.tensor(0.9), torch.tensor(0.99))),
        ("own", {"a": [torch.ones(600), torch.ones(0)], "b": NAN}),
        ("own", [NAN, -0.0, 1 + 2j]),
        ("own", np.array([1, 2])),
    ],
)
@pytest.mark.parametrize("has_one", [False, True])
def test_equal_values_are_loaded(tmp_path: Path, setting: str, value: Any, has_one: bool) -> None:
    """Also where each group had tensors of its own."""
    again = torch.load(_copied(value, tmp_path / "copy"), weights_only=False)
    state = one_group(setting, again if has_one else 0.5 if setting != "betas" else (0.5, 0.5))
    with saved(tmp_path / "store", setting, value, again) as store:
        check = store[1].check_load(state)
        assert check.fits
        assert bool(check.num_tied) == ("tensor" in repr(value))
        store.load(state)
    assert state["model"][0].weight.any()
    assert repr(state["optimizer"].param_groups[0][setting]) == repr(value)


def _copied(value: Any, path: Path) -> Path:
    torch.save(value, path)
    return path


def test_a_setting_of_many_parameters_is_compared_in_one_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As stock DCP stores them: for each parameter a tensor of its own."""
    layers = nn.ParameterList([torch.ones(1) for _ in range(30)])
    groups = [{"params": [item], "lr": torch.tensor(0.25)} for item in layers]
    reads: list[int] = []
    with open_store(tmp_path, durable=False) as store:
        store.save(1, {"model": layers, "optimizer": optim.SGD(groups)})
        fill = StoredState.fill_boxes

        def watched(self: StoredState, wanted: Any) -> None:
            reads.append(len(wanted))
            fill(self, wanted)

        monkeypatch.setattr(StoredState, "fill_boxes", watched)
        optimizer = optim.SGD(layers.parameters(), lr=torch.tensor(0.5))
        store.load({"model": layers, "optimizer": optimizer})
    assert reads == [30]
    assert math.isclose(float(optimizer.param_groups[0]["lr"]), 0.25)
