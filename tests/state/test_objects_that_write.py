"""Objects whose code writes to others while they are loaded: a load ends with what was saved, and says so."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.states import StateCase, run
from meshes import new_uri
from thread_ranks import run_threads
from torch import nn

from ckptstore import open_store
from ckptstore.testing.oracle import difference, observed


class Writer:
    """Writes to others when it is loaded."""

    def __init__(self, write: Callable[[], object]) -> None:
        self._write = write

    def state_dict(self) -> dict[str, int]:
        return {"count": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._write()

    def load_rank_states(self, states: list[dict[str, int]]) -> None:
        self._write()


def _trained(make: Callable[[Any], torch.optim.Optimizer]) -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    optimizer = make([{"params": model[0].parameters()}, {"params": model[1].parameters()}])
    (model(torch.randn(4, 2)) * torch.randn(4, 3)).sum().backward()  # a plain sum has no gradient behind a norm
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def _differs(one: dict[str, Any], other: dict[str, Any]) -> str | None:
    return difference(observed(one), observed(other), marks=False)


def _warnings(caplog: pytest.LogCaptureFixture) -> str:
    return " ".join(record.getMessage() for record in caplog.records if record.levelno == logging.WARNING)


GROUPS = {
    "lr": lambda group: group.update(lr=9.0),
    "betas": lambda group: group.update(betas=(0.1, 0.2)),
    "weight_decay": lambda group: group.pop("weight_decay"),
    "eps": lambda group: group.update(eps=torch.ones(())),
}


@pytest.mark.parametrize("setting", GROUPS)
@pytest.mark.parametrize("first", ["writer", "model"])
def test_groups_of_all_optimizers_are_as_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, first: str, setting: str
) -> None:
    def state(rate: float) -> dict[str, Any]:
        made = _trained(lambda groups: torch.optim.AdamW(groups, lr=rate))
        other = nn.Linear(2, 2)
        made |= {"other": other, "second": torch.optim.AdamW(other.parameters(), lr=2 * rate)}
        writer = Writer(lambda: [GROUPS[setting](made[key].param_groups[-1]) for key in ("optimizer", "second")])
        return {"writer": writer, **made} if first == "writer" else {**made, "writer": writer}

    saved, fresh = state(0.5), state(0.25)
    with open_store(tmp_path / "store") as store:
        store.save(1, saved)
        store.load(fresh)
    assert not _differs(fresh, saved)
    warned = _warnings(caplog)
    assert f"optimizer.param_groups.1.{setting} " in warned
    assert f"second.param_groups.0.{setting} " in warned
    assert "param_groups.0.params" not in warned


@pytest.mark.parametrize("write", [lambda rate: rate.fill_(9.0), lambda rate: None], ids=["written", "left"])
def test_a_tensor_in_a_group_is_as_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, write: Callable[[torch.Tensor], object]
) -> None:
    def state(rate: float) -> dict[str, Any]:
        return _trained(lambda groups: torch.optim.Adam(groups, lr=torch.tensor(rate), foreach=False))

    saved, fresh = state(0.5), state(0.25)
    rate = fresh["optimizer"].param_groups[0]["lr"]
    with open_store(tmp_path / "store") as store:
        store.save(1, {**saved, "writer": Writer(lambda: None)})
        store.load({**fresh, "writer": Writer(lambda: write(rate))})
    assert fresh["optimizer"].param_groups[0]["lr"] is rate
    assert float(rate) == 0.5
    assert ("lr" in _warnings(caplog)) == (write(torch.zeros(())) is not None)


def _new_memory(model: nn.Module) -> None:
    model[0].weight.data = torch.zeros_like(model[0].weight.data)  # type: ignore[index]


def _new_parameter(model: nn.Module) -> None:
    model[0].weight = nn.Parameter(torch.zeros_like(model[0].weight))  # type: ignore[index]


WEIGHTS: dict[str, Callable[[dict[str, Any]], object]] = {
    "in place": lambda state: state["model"][0].weight.data.zero_(),
    "new memory": lambda state: _new_memory(state["model"]),
    "new parameter": lambda state: _new_parameter(state["model"]),
    "buffer": lambda state: state["model"][1].running_var.zero_(),
    "state": lambda state: next(iter(state["optimizer"].state.values()))["exp_avg"].zero_(),
    "new state": lambda state: state["optimizer"].state.clear(),
    "a tensor": lambda state: state["raw"]["t"].zero_(),
}


@pytest.mark.parametrize("where", WEIGHTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_numbers_are_as_saved(tmp_path: Path, caplog: pytest.LogCaptureFixture, where: str, dtype: torch.dtype) -> None:
    def state() -> dict[str, Any]:
        return {**_trained(torch.optim.Adam), "raw": {"t": torch.randn(3)}}

    saved, fresh = state(), state()
    if dtype is not torch.float32:
        fresh["model"].to(dtype)
    with open_store(tmp_path / "store") as store:
        store.save(1, {**saved, "writer": Writer(lambda: None)})
        store.load({"writer": Writer(lambda: WEIGHTS[where](fresh)), **fresh}, dtype="state")
    fresh["model"].to(torch.float32)
    assert not _differs(fresh, saved)
    key = {"buffer": "model.1.running_var", "a tensor": "raw.t", "state": "optimizer.state", "new state": "optimizer"}
    assert key.get(where, "model.0.weight") in _warnings(caplog)


def test_the_states_of_all_ranks_are_passed_before(caplog: pytest.LogCaptureFixture) -> None:
    saved, fresh, uri = _trained(torch.optim.Adam), _trained(torch.optim.Adam), new_uri()
    of_rank = [saved, copy.deepcopy(saved)]
    run_threads(2, uri, lambda store, rank: store.save(1, {**of_rank[rank], "writer": Writer(lambda: None)}))
    writer = Writer(lambda: fresh["optimizer"].param_groups[0].update(lr=9.0))
    with open_store(uri) as store:
        store.load({**fresh, "writer": writer})
    assert not _differs(fresh, saved)
    assert "optimizer.param_groups.0.lr (9.0 in place of 0.001)" in _warnings(caplog)
    assert "other than they were saved" not in _warnings(caplog)


class _SetsItsScale(nn.Module):
    scale: torch.Tensor

    def __init__(self, scale: float) -> None:
        super().__init__()
        self._of_constructor = scale
        self.register_buffer("scale", torch.tensor(scale))

    def get_extra_state(self) -> dict[str, int]:
        return {"count": 1}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.scale.fill_(self._of_constructor)


def test_a_module_that_sets_its_own_buffers_does_so_as_with_torch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved, fresh, by_torch = _SetsItsScale(0.5), _SetsItsScale(0.25), _SetsItsScale(0.25)
    by_torch.load_state_dict(saved.state_dict())
    with open_store(tmp_path / "store") as store:
        store.save(1, {"m": saved})
        store.load({"m": fresh})
    assert fresh.scale == by_torch.scale == 0.25
    assert "other than they were saved: m.scale (other numbers, by the own code of the _SetsItsScale)" in _warnings(
        caplog
    )


def test_what_cannot_be_put_back_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved, fresh = _trained(torch.optim.Adam), _trained(torch.optim.Adam)

    def write() -> None:
        fresh["model"].half()
        fresh["optimizer"].param_groups[0]["scale"] = 3
        fresh["optimizer"].add_param_group({"params": [nn.Parameter(torch.zeros(1))]})

    with open_store(tmp_path / "store") as store:
        store.save(1, {**saved, "writer": Writer(lambda: None)})
        store.load({**fresh, "writer": Writer(write)})
    warned = _warnings(caplog)
    assert "other than they were saved" in warned
    for key in ("model.0.weight (other numbers)", "param_groups.0.scale (a setting that", "(3 groups, 2 were loaded)"):
        assert key in warned


def test_schedulers_of_torch_say_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def state(rate: float) -> dict[str, Any]:
        made = _trained(lambda groups: torch.optim.Adam(groups, lr=rate))
        scheduler = torch.optim.lr_scheduler.OneCycleLR(made["optimizer"], rate, total_steps=9)
        return {"scheduler": scheduler, **made}

    saved, fresh = state(0.5), state(0.25)
    with open_store(tmp_path / "store") as store:
        store.save(1, saved)
        store.load(fresh)
    assert not _differs(fresh, saved)
    assert not _warnings(caplog)


@pytest.mark.parametrize(
    "case",
    [
        StateCase(1, modules=("log scale",), extras=("averages",), change="upgraded"),
        StateCase(2, modules=("old weight norm",), extras=("averages",), change="upgraded"),
        StateCase(3, modules=("negating",), extras=("averages",)),
        StateCase(
            4, modules=("compiled in checkpointed",), extras=("averages swapped",), change="first layer", strict=False
        ),
    ],
    ids=lambda case: case.modules[0],
)
def test_what_code_of_a_module_makes_of_the_stored_is_held_and_nothing_else(case: StateCase) -> None:
    """What was read cannot be read again, and a layer that nothing fills is the object's to write."""
    outcome = run(case)
    assert outcome.kind == "same", outcome.detail
