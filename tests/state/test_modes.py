"""Saves and loads in every mode of torch that a caller may be in: what is made is what it would be without the mode."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from carrier import bits
from kit.states.case_runner import default_dtype
from torch import nn

import ckptstore


@contextmanager
def default_device(name: str) -> Iterator[None]:
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None)


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "inference": torch.inference_mode,
    "no_grad": torch.no_grad,
    "device meta": lambda: torch.device("meta"),
    "default device meta": lambda: default_device("meta"),
    "default dtype": lambda: default_dtype(torch.float64),
}


class Keeper:
    """Keeps what it is given, and something that it makes of it."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self.tensors = list(tensors)

    def state_dict(self) -> dict[str, Any]:
        return {"tensors": self.tensors, "bytes": b"x" * 70_000}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tensors = state["tensors"]


def make(*, trained: bool) -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 2, bias=False))
    model[2].weight.requires_grad_(False)
    optimizer = torch.optim.AdamW([item for item in model.parameters() if item.requires_grad])
    if trained:
        model(torch.rand(4, 3)).sum().backward()
        optimizer.step()
    return {
        "model": model,
        "optim": optimizer,
        "sched": torch.optim.lr_scheduler.StepLR(optimizer, 2),
        "keeper": Keeper(torch.rand(3), torch.arange(4).int()) if trained else Keeper(),
        "strided": torch.rand(600, 500).t() if trained else torch.zeros(600, 500).t(),
        "numbers": list(range(2000)) if trained else [],
        "made": {"t": torch.rand(2), "n": 1} if trained else {},
    }


def seen(state: dict[str, Any]) -> Any:
    optimizer = state["optim"]
    parameters = [item for group in optimizer.param_groups for item in group["params"]]
    return bits(
        [
            dict(state["model"].state_dict()),
            [dict(sorted(optimizer.state[item].items())) for item in parameters],
            [dict(sorted({**group, "params": None}.items())) for group in optimizer.param_groups],
            {key: item for key, item in state["sched"].state_dict().items() if not key.startswith("_")},
            state["keeper"].tensors,
            [state["strided"], state["numbers"], state["made"]],
        ]
    )


def tensors_of(state: dict[str, Any]) -> list[torch.Tensor]:
    optimizer = state["optim"]
    return [
        *state["model"].parameters(),
        *state["model"].buffers(),
        *(item for held in optimizer.state.values() for item in held.values()),
        *state["keeper"].tensors,
        state["strided"],
        state["made"]["t"],
    ]


USES = [(None, None), *((mode, None) for mode in MODES), *((None, mode) for mode in MODES)]


@pytest.mark.parametrize(("at_save", "at_load"), [*USES, *((mode, mode) for mode in MODES)])
def test_a_mode_changes_nothing_that_is_stored_or_made(tmp_path: Path, at_save: Any, at_load: Any) -> None:
    state, other = make(trained=True), make(trained=False)
    before = seen(state)
    with ckptstore.open_store(tmp_path, group="solo") as store:
        with MODES[at_save]() if at_save else torch.enable_grad():
            store.save(0, state)
            store.save_async(1, state).result()
        for step in (0, 1):
            target = copy.deepcopy(other)
            with MODES[at_load]() if at_load else torch.enable_grad():
                store[step].load(target)
            assert seen(target) == before
            assert not any(tensor.is_inference() or tensor.is_meta for tensor in tensors_of(target))
            wanted = [item.requires_grad for item in state["model"].parameters()]
            assert [item.requires_grad for item in target["model"].parameters()] == wanted
            target["model"](torch.rand(4, 3)).sum().backward()
            target["optim"].step()
    assert seen(state) == before


@pytest.mark.parametrize("is_inside", [True, False])
def test_inference_tensors_can_be_loaded_into(tmp_path: Path, is_inside: bool) -> None:
    model, table = nn.Linear(600, 500), torch.rand(600, 500)
    with torch.inference_mode():
        served, own = nn.Linear(600, 500), torch.zeros(500, 600).t()
    with ckptstore.open_store(tmp_path, group="solo") as store:
        store.save(0, {"m": model, "t": table})
        with torch.inference_mode(is_inside):
            store.load({"m": served, "t": own})
        assert torch.equal(served.weight, model.weight)
        assert torch.equal(own, table)
        store.save(1, {"m": served, "t": own})
        with torch.inference_mode():
            half = nn.Linear(600, 500).bfloat16()
        store.load({"m": half}, dtype="state")
    assert torch.equal(half.weight, model.weight.bfloat16())


def test_a_meta_module_under_the_default_device_meta_gets_memory_on_the_cpu(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with ckptstore.open_store(tmp_path, group="solo") as store:
        store.save(0, {"m": model})
        with torch.device("meta"):
            other = nn.Linear(2, 2)
            store.load({"m": other})
    assert torch.equal(other.weight, model.weight)
    assert other.weight.requires_grad
