"""Tensors in places of a state that have no key: members of sets, keys of dicts, bounds of slices."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

from ckptstore import InvalidState, open_store
from ckptstore.state import per_rank, replicated
from ckptstore.state.live.flatten import TensorRef, find_references

W = nn.Parameter(torch.ones(3))


class Held:
    """An object with a state."""

    def __init__(self, state: Any) -> None:
        self._state = state

    def state_dict(self) -> Any:
        return self._state

    def load_state_dict(self, state: Any) -> None:
        raise AssertionError(state)


class Extra(nn.Module):
    def get_extra_state(self) -> Any:
        return {"seen": {W}}

    def set_extra_state(self, state: Any) -> None:
        raise AssertionError(state)


def optimizer(item: Any, *, in_group: bool) -> dict[str, Any]:
    layer = nn.Linear(1, 1, bias=False)
    made = optim.SGD([{"params": [layer.weight], **({"own": item} if in_group else {})}])
    if not in_group:
        made.state[layer.weight] = {"own": item}
    return {"layer": layer, "optimizer": made}


STATES: dict[str, tuple[Callable[[], Any], str]] = {
    "key": (lambda: {"lr_of": {W: 0.1}}, "lr_of has a tensor as a key"),
    "set": (lambda: {"frozen": {W}}, "frozen has a tensor in a set"),
    "deep": (lambda: {"a": [{"b": (1, frozenset({(1, W)}))}]}, r"a\.0\.b\.1 has a tensor in a frozenset"),
    "tuple as a key": (lambda: {"a": {("w", (W,)): 1}}, "a has a tensor as a key"),
    "set as a key": (lambda: {"a": {frozenset({W}): 1}}, "a has a tensor as a key"),
    "slice": (lambda: {"a": [slice(0, torch.tensor(3))]}, r"a\.0 has a tensor in a slice"),
    "ordered": (lambda: {"a": OrderedDict([(W, 1)])}, "a has a tensor as a key"),
    "default": (lambda: {"a": defaultdict(int, {W: 1})}, "a has a tensor as a key"),
    "counter": (lambda: {"a": Counter([W])}, "a has a tensor as a key"),
    "many": (lambda: {"a": {torch.ones(1): number for number in range(2000)}}, "a has a tensor as a key"),
    "object under it": (lambda: {"a": {W: nn.Linear(1, 1)}}, "a has a tensor as a key"),
    "beside an object": (lambda: {"a": (nn.Linear(1, 1), {W})}, r"a\.1 has a tensor in a set"),
    "marked": (lambda: {"a": per_rank({"b": {replicated(W)}})}, r"a\.b has a tensor in a set"),
    "state of an object": (lambda: {"a": Held({"b": {W: 1}})}, r"a\.b has a tensor as a key"),
    "extra state": (lambda: {"a": Extra()}, r"a\._extra_state\.seen has a tensor in a set"),
    "optimizer state": (lambda: optimizer({W: 1}, in_group=False), r"own has a tensor as a key"),
    "group": (lambda: optimizer([{W}], in_group=True), r"own\.0 has a tensor in a set"),
}


@pytest.mark.parametrize("name", STATES)
def test_a_save_refuses_them_before_anything_is_written(name: str, tmp_path: Path) -> None:
    make, words = STATES[name]
    with open_store(tmp_path, durable=False) as store:
        store.save(1, {"epoch": 1})
        before = sorted(tmp_path.rglob("*"))
        for state in (make(), {"w": W, **make()}):
            for allow_pickle in (False, True):
                with pytest.raises(InvalidState, match=f"{words}, where no load .* Put it into a list, or into a dict"):
                    store.save(2, state, allow_pickle=allow_pickle)
            with pytest.raises(InvalidState, match=words):
                store.save_async(3, state).result()
        assert sorted(path for path in tmp_path.rglob("*") if path.suffix == ".distcp") == [
            path for path in before if path.suffix == ".distcp"
        ]
        assert list(store) == [store[1]]


def test_sets_and_keys_without_tensors_are_plain_values(tmp_path: Path) -> None:
    state = {"a": {"b": {1, (2, "x")}, (3, None): frozenset({b"y"}), 4.5: slice(1, None)}}
    with open_store(tmp_path, durable=False) as store:
        store.save(1, state)
        assert store[1].to_dict() == state


def test_what_earlier_saves_have_written_is_refused_when_it_is_asked_for() -> None:
    for value in ({TensorRef("w"): 1}, {"a": [{TensorRef("w")}]}):
        with pytest.raises(InvalidState, match="a tensor"):
            list(find_references(value, ("x",)))
