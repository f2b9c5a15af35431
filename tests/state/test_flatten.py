"""Flat keys are those of stock DCP, and values with tensors in them come back as they were."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import Any

import pytest
import torch
from carrier import bits, saved
from hypothesis import given, reject
from hypothesis import strategies as st
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from ckptstore import InvalidState
from ckptstore.state.live.apply import collect
from ckptstore.state.live.flatten import join_path, stock_leaves

plain = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=5), st.binary())
tensors = st.integers(0, 5).map(lambda size: torch.arange(size, dtype=torch.float32))
names = st.text("abcdef", min_size=1, max_size=3)


def nested(leaves: st.SearchStrategy[Any], keys: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.lists(inner, max_size=3).map(tuple),
            st.dictionaries(keys, inner, max_size=3),
            st.dictionaries(keys, inner, max_size=3).map(OrderedDict),
            st.dictionaries(keys, inner, max_size=3).map(lambda items: defaultdict(list, items)),
        ),
        max_leaves=12,
    )


@given(st.dictionaries(names, nested(plain | tensors, names | st.integers(0, 9)), min_size=1, max_size=4))
def test_a_value_comes_back_with_its_containers_and_tensors(state: dict[str, Any]) -> None:
    try:
        checkpoint = saved(state)
    except InvalidState:  # {1: ..., "1": ...} with tensors in both
        reject()
    found: dict[str, Any] = dict.fromkeys(state)
    checkpoint.load(found)
    assert bits(found) == bits(state)


@given(st.dictionaries(names, nested(plain | tensors, names), min_size=1, max_size=4))
def test_keys_and_paths_are_those_of_stock_dcp(state: dict[str, Any]) -> None:
    """Leaving out tuples with tensors in them, which stock DCP pickles whole."""
    stock, paths = flatten_state_dict(state)
    flat = collect(state)
    leaves = {join_path(path): leaf for key in state for path, leaf in stock_leaves(state[key], (key,))}
    assert leaves.keys() == {key for key, item in stock.items() if not isinstance(item, torch.Tensor)}
    assert all(leaves[key] is stock[key] for key in leaves)
    in_stock = {key for key, item in stock.items() if isinstance(item, torch.Tensor)}
    assert in_stock <= flat.tensors.keys() | flat.aliases.keys()
    assert all(flat.paths[key] == paths[key] for key in in_stock)


def loop() -> list[Any]:
    made: list[Any] = [torch.ones(1)]
    made.append(made)
    return made


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"a": {1: torch.ones(1), "1": torch.zeros(1)}}, r"'a\.1'.*\['a', '1'\].*\['a', '1'\]"),
        ({"model": torch.nn.Linear(1, 1), "model-2": 1, "model.ema": 3}, r"'model' and 'model\.ema' overlap"),
        ({"first": 1, "loop": loop()}, r"^loop is .*contains itself"),
        ([1], "a state is a dict, not a list"),
        (torch.nn.Linear(1, 1), "a state is a dict, not a Linear"),
        ({1: 2}, "the keys of a state are text, not 1"),
        ({"": 2}, "the keys of a state are text, not ''"),
    ],
    ids=["one key", "overlap", "loop", "list", "module", "number", "no text"],
)
def test_what_has_no_keys_of_its_own_is_refused(state: Any, words: str) -> None:
    with pytest.raises(InvalidState, match=words):
        collect(state)
