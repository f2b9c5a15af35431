"""Values that stand in a tuple, or in a mapping that cannot be changed, beside objects."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from ckptstore import StateMismatch, open_store
from ckptstore.state import per_rank, replicated


class Training(NamedTuple):
    model: nn.Module
    step: int


class Frozen(Mapping[str, Any]):
    """Cannot be made from its items."""

    def __init__(self, **items: Any) -> None:
        self._items = items

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


class Sorted(tuple[Any, ...]):
    """Made from its items, it has them in another order."""

    __slots__ = ()

    def __new__(cls, items: Any) -> Sorted:
        return super().__new__(cls, sorted(items, key=lambda item: isinstance(item, nn.Module)))


def linear(value: float = 0.0) -> nn.Linear:
    made = nn.Linear(1, 1, bias=False)
    nn.init.constant_(made.weight, value)
    return made


MAKERS: dict[str, Callable[[nn.Module, int], Any]] = {
    "tuple": lambda model, step: (model, "adam", step, {"step": step}, [step]),
    "tuple of tuples": lambda model, step: ((model, (step, step)), [(model, step)], step),
    "named tuple": Training,
    "proxy": lambda model, step: MappingProxyType({"model": model, "more": (model, step), "step": step}),
    "marked": lambda model, step: (model, per_rank(step), replicated(torch.full((2,), float(step)))),
    "none": lambda model, step: (model, None, torch.full((2,), float(step))),
}


@pytest.mark.parametrize("name", MAKERS)
def test_other_values_make_the_container_anew_and_equal_ones_leave_it(name: str, tmp_path: Path) -> None:
    make = MAKERS[name]
    with open_store(tmp_path, durable=False) as store:
        store.save(1, {"train": make(linear(2.0), 1234)})
        model = linear()
        state = {"train": make(model, 5)}
        store.load(state)
        assert repr(state) == repr({"train": make(model, 1234)})
        assert type(state["train"]) is type(make(model, 5))
        assert model.weight.item() == 2.0
        held = state["train"]
        store.load(state)
        assert state["train"] is held


def test_a_tensor_on_the_meta_device_gets_memory_in_a_tuple(tmp_path: Path) -> None:
    with open_store(tmp_path, durable=False) as store:
        store.save(1, {"train": (linear(2.0), torch.ones(2))})
        state = {"train": (linear(), torch.empty(2, device="meta"))}
        store.load(state)
    assert torch.equal(state["train"][1], torch.ones(2))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda model, step: {"train": Frozen(model=model, step=step)}, r"train\.step cannot be loaded: a Frozen"),
        (lambda model, step: {"train": Sorted([step, "a", model])}, None),
        (lambda model, step: {"train": Frozen(inner=(model, step))}, r"train\.inner\.1 cannot be loaded: a Frozen"),
        (lambda model, step: MappingProxyType({"model": model, "step": step}), "step cannot be loaded: the state is a"),
    ],
)
def test_what_cannot_be_made_anew_is_refused_before_anything_is_changed(
    make: Callable[[nn.Module, int], Any], words: str | None, tmp_path: Path
) -> None:
    model = linear()
    with open_store(tmp_path, durable=False) as store:
        store.save(1, make(linear(2.0), 1))
        other = make(model, 5)
        if words is None:
            store.load(other)
        else:
            for load in (store.load, store.resume):
                with pytest.raises(StateMismatch, match=f"{words}.* use a dict in its place"):
                    load(other)
            assert store[1].check_load(other).problem
            assert model.weight.item() == 0.0
        store.load(make(model, 1))  # nothing has to be replaced
    assert model.weight.item() == 2.0
