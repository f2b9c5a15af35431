"""State of a parameter that is no dict of tensors and numbers: torch's own `load_state_dict` takes most of it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from carrier import bits
from torch import nn, optim

from ckptstore import StateMismatch, open_store

DOUBLE = torch.float64
"""Not the dtype of the parameters, to which torch casts state."""

STATES: dict[str, Callable[[torch.Tensor], Any]] = {
    "list": lambda item: [torch.full((2,), 3.0, dtype=DOUBLE), 3, "text", {"a": (torch.ones(1), None)}],
    "empty list": lambda item: [],
    "tuple": lambda item: (1, "text", None),
    "tensor": lambda item: torch.full_like(item, 3.0, dtype=DOUBLE),
    "tensor of another shape": lambda item: torch.arange(6).reshape(2, 3),
    "number": lambda item: 3,
    "text": lambda item: "text",
    "none": lambda item: None,
    "array": lambda item: np.arange(3),
    "texts": lambda item: {"mode": "fast", "log": ["a", ("b", {"c": "d"})]},
    "kinds": lambda item: {"o": OrderedDict(b=1, a=2), "size": torch.Size([2, 3]), "set": {"a", "b"}, "bytes": b"\x00"},
    "arrays": lambda item: {"history": np.arange(3.0), "inside": [np.array(4), {"a": np.zeros((2, 2))}]},
    "names that are not text": lambda item: {0: torch.ones(2, dtype=DOUBLE), "a.b": "text"},
}


class Overriding(optim.SGD):
    """Changes what it gets, as one that takes the checkpoints of its older releases does."""

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        for items in self.state.values():
            if isinstance(items, dict) and "mode" in items:
                items["version"] = 2


def training(kind: type[optim.Optimizer], make: Callable[[torch.Tensor], Any] | None = None) -> dict[str, Any]:
    model = nn.Linear(2, 1)
    optimizer = kind(model.parameters(), lr=0.1)  # type: ignore[call-arg]
    if make is not None:
        optimizer.state[model.weight], optimizer.state[model.bias] = make(model.weight), make(model.bias)
    return {"model": model, "optimizer": optimizer}


def states(state: dict[str, Any]) -> list[Any]:
    """The state of each parameter, its items in the order of their names."""
    every = state["optimizer"].state.values()
    return [shown(dict(sorted(item.items(), key=str)) if isinstance(item, dict) else item) for item in every]


def shown(value: Any) -> Any:
    if isinstance(value, dict):
        return type(value), [(key, shown(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [shown(item) for item in value]
    return bits(value) if isinstance(value, torch.Tensor) else repr(value)


@pytest.mark.parametrize("before", [None, "list", "tensor", "number", "texts", "same"])
@pytest.mark.parametrize("name", STATES)
def test_it_comes_back_whatever_was_there(name: str, before: str | None, tmp_path: Path) -> None:
    make = STATES[name]
    saved = training(optim.SGD, make)
    with open_store(tmp_path, durable=False) as store:
        store.save(1, saved)
        other = training(optim.SGD, None if before is None else STATES[name if before == "same" else before])
        if before == "tensor" and name == "tensor of another shape":
            with pytest.raises(StateMismatch, match=r"optimizer\.state\.model\.weight is int64 .* in the checkpoint"):
                store.load(other)
            return
        store.load(other)
    assert states(other) == states(saved)
    assert torch.equal(other["model"].weight, saved["model"].weight)


@pytest.mark.parametrize("name", ["list", "tensor", "number", "none"])
def test_it_stays_where_nothing_of_it_is_asked_for(name: str, tmp_path: Path) -> None:
    with open_store(tmp_path, durable=False) as store:
        store.save(1, training(optim.SGD, STATES["text"]))
        other = training(optim.SGD, STATES[name])
        before = states(other)
        store.load(other, include=["model.*", "optimizer.param_groups.*"])
        assert states(other) == before
        bare = training(optim.SGD)
        store.save(2, bare)
        store.load(other)
    assert states(other) == []


def test_what_the_checkpoint_lacks_is_named(tmp_path: Path) -> None:
    with open_store(tmp_path, durable=False) as store:
        store.save(1, {"model": nn.Linear(2, 1)})
        loaded = store.load(training(optim.SGD, STATES["list"]), strict=False)
    assert loaded is not None
    assert loaded.load_report is not None
    assert {"optimizer.state.model.bias", "optimizer.state.model.weight"} <= set(loaded.load_report.missing)


def test_what_the_optimizer_makes_of_it_stays(tmp_path: Path) -> None:
    with open_store(tmp_path, durable=False) as store:
        store.save(1, training(Overriding, STATES["texts"]))
        other = training(Overriding)
        store.load(other)
        assert [items["mode"] for items in other["optimizer"].state.values()] == ["fast", "fast"]
        assert [items["version"] for items in other["optimizer"].state.values()] == [2, 2]


def test_a_file_in_memory_comes_back(tmp_path: Path) -> None:
    with open_store(tmp_path, durable=False) as store:
        store.save(1, training(optim.SGD, lambda item: {"log": BytesIO(b"abc")}))
        other = training(optim.SGD)
        store.load(other)
    assert [items["log"].getvalue() for items in other["optimizer"].state.values()] == [b"abc", b"abc"]
