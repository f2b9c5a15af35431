"""Flat keys are those of stock DCP, and values with tensors in them come back as they were."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from typing import Any, NamedTuple

import pytest
import torch
from carrier import bits, values_of
from hypothesis import given, reject
from hypothesis import strategies as st
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from ckptstore.errors import InvalidState
from ckptstore.state.live.apply import collect
from ckptstore.state.live.flatten import (
    FlatState,
    Kind,
    TensorRef,
    find_tensors,
    join_path,
    map_tensors,
    references_in,
    replicated,
    stock_leaves,
    units_of,
)

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
        flat = collect(state)
    except InvalidState:  # {1: ..., "1": ...} with tensors in both
        reject()
    stored = values_of(flat)
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            assert key not in stored
            assert flat.tensors[key].tensor is value
            continue
        assert len(list(references_in(stored[key]))) == len(list(find_tensors(value, (key,))))
        assert not list(find_tensors(stored[key], (key,))), "tensors travel on their own"
        back = map_tensors(stored[key], (key,), lambda _, leaf: flat.tensors[leaf.key].tensor)
        assert bits(back) == bits(value)


@given(st.dictionaries(names, nested(plain | tensors, names), min_size=1, max_size=4))
def test_keys_and_paths_are_those_of_stock_dcp(state: dict[str, Any]) -> None:
    """Leaving out tuples with tensors in them, which stock DCP pickles whole."""
    stock, paths = flatten_state_dict(state)
    flat = collect(state)
    leaves = {join_path(path): leaf for key in state for path, leaf in stock_leaves(state[key], (key,))}
    assert leaves.keys() == {key for key, item in stock.items() if not isinstance(item, torch.Tensor)}
    assert all(leaves[key] is stock[key] for key in leaves)
    in_stock = {key for key, item in stock.items() if isinstance(item, torch.Tensor)}
    mine = flat.tensors.keys() | flat.aliases.keys()
    assert in_stock <= mine
    assert all(flat.paths[key] == paths[key] for key in in_stock)


class Point(NamedTuple):
    x: Any
    y: Any


def test_containers_of_every_type_are_rebuilt_and_others_kept_as_they_are() -> None:
    tensor, untouched = torch.ones(2), {"deep": [1, 2]}
    value = {
        1: Point(tensor, "y"),
        "counter": Counter(a=2),
        "order": OrderedDict([("b", tensor), ("a", untouched)]),
        "both": (untouched, [tensor]),
    }
    template = map_tensors(value, ("v",), lambda key, _: TensorRef(key))
    assert list(references_in(template)) == ["v.1.0", "v.order.b", "v.both.1.0"]
    back = map_tensors(template, ("v",), lambda _, leaf: (leaf.key, tensor))
    assert type(back[1]) is Point
    assert back[1].x == ("v.1.0", tensor)
    assert type(back["order"]) is OrderedDict
    assert back["order"]["a"] is untouched
    assert back["counter"] is value["counter"]
    assert value[1].x is tensor, "the value itself is not changed"


def test_two_places_with_one_key_are_refused_with_both_paths() -> None:
    with pytest.raises(InvalidState, match=r"'a\.1'.*\['a', '1'\].*\['a', '1'\]"):
        collect({"a": {1: torch.ones(1), "1": torch.zeros(1)}})


@pytest.mark.parametrize("state", [[1], torch.nn.Linear(1, 1), {1: 2}, {"": 2}])
def test_what_is_no_state_is_refused(state: Any) -> None:
    with pytest.raises(InvalidState):
        collect(state)


def test_a_key_that_begins_with_another_one_is_refused() -> None:
    with pytest.raises(InvalidState, match=r"'model' and 'model\.ema' overlap"):
        collect({"model": torch.nn.Linear(1, 1), "model-2": 1, "model.ema": 3})


def test_a_value_that_contains_itself_is_refused() -> None:
    loop: list[Any] = [torch.ones(1)]
    loop.append(loop)
    with pytest.raises(InvalidState, match=r"^loop is .*contains itself"):
        collect({"first": 1, "loop": loop})


def test_live_objects_are_found_inside_containers_and_the_rest_stays_whole() -> None:
    model, optimizer = torch.nn.Linear(1, 1), torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    scaler = torch.amp.GradScaler("cpu")
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    units = units_of({"a": {"m": model, "n": [optimizer, {"s": scheduler}], "p": {"x": 1}}, "b": scaler, "c": (1, 2)})
    assert [(unit.key, unit.kind) for unit in units] == [
        ("a.m", Kind.MODULE),
        ("a.n.0", Kind.OPTIMIZER),
        ("a.n.1.s", Kind.SCHEDULER),
        ("a.p", Kind.VALUE),
        ("b", Kind.STATEFUL),
        ("c", Kind.VALUE),
    ]


def test_the_same_memory_is_stored_once_and_views_of_a_part_are_not_the_same() -> None:
    base = torch.arange(6.0)
    flat = collect({"a": base, "b": {"again": base.view(6), "part": base[:3], "shaped": base.view(2, 3)}})
    assert flat.aliases == {"b.again": "a"}
    assert set(flat.tensors) == {"a", "b.part", "b.shaped"}
    assert flat.key_of(flat.values["b"]["again"]) == "a"


def test_empty_tensors_are_never_the_same() -> None:
    assert not collect({"a": torch.empty(0), "b": torch.empty(0)}).aliases


def test_the_callers_word_is_kept_and_the_marker_is_not_stored() -> None:
    table = torch.ones(3)
    flat = collect({"t": replicated(table), "more": {"t": replicated(torch.zeros(1)), "n": 1, "u": torch.ones(1)}})
    assert flat.tensors["t"].replicated
    assert flat.tensors["t"].tensor is table
    assert flat.tensors["more.t"].replicated
    assert not flat.tensors["more.u"].replicated
    assert isinstance(flat.values["more"]["t"], torch.Tensor)
    assert flat.key_of(flat.values["more"]["t"]) == "more.t"


def test_a_flat_state_starts_empty() -> None:
    assert FlatState().tensors == {}
