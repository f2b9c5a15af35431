"""What a store keeps from one save to the next changes no file, and a save costs the same with many live."""

from __future__ import annotations

import gc
import sys
import tempfile
import weakref
from itertools import cycle
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from trees import settle

from ckptstore import StepExists, open_store
from ckptstore.errors import InvalidState
from ckptstore.state.index.items import Item, Mode, without_digests
from ckptstore.state.index.tensor_index import TensorIndex
from ckptstore.state.write import assignment
from ckptstore.stock import stock_write

_TENSORS = {
    "floats": lambda: torch.rand(3, 5),
    "other floats": lambda: torch.rand(3, 5),
    "turned": lambda: torch.rand(5, 3),
    "as many bytes": lambda: torch.randint(100, (3, 5), dtype=torch.int32),
    "longer": lambda: torch.rand(4, 5),
    "ints": lambda: torch.randint(100, (15,)),
    "strided": lambda: torch.rand(5, 3).T,
    "scalar": lambda: torch.rand(()),
    "empty": lambda: torch.rand(0, 5),
    "large": lambda: torch.rand(600_000),
}
_VALUES = st.integers(0, 1 << 40) | st.floats(allow_nan=False) | st.lists(st.integers(0, 9), max_size=3)
_PART = st.sampled_from(sorted(_TENSORS)) | st.just("tied") | _VALUES
_STATES = st.lists(st.dictionaries(st.sampled_from("abcde"), _PART, max_size=5), min_size=2, max_size=5)
_PLAIN: list[dict[str, Any]] = [{}, {"stock_readable": False}, {"stock_readable": True}]
_WAYS = st.lists(st.sampled_from([*_PLAIN, {"incremental": True}, {"incremental": "reference"}, None]), min_size=1)
"""The options of one save after another, again and again; None for one that fails."""


def made(parts: dict[str, Any]) -> dict[str, Any]:
    """A state; what is tied is the first tensor once more."""
    state: dict[str, Any] = {}
    for key, part in parts.items():
        if part == "tied":
            state[key] = next((value for value in state.values() if isinstance(value, torch.Tensor)), "nothing")
        else:
            state[key] = _TENSORS[part]() if isinstance(part, str) else part
    return {"state": state, "step": len(state)}


def files_of(path: str) -> dict[str, bytes]:
    """All but the manifest, which has times and digests of the others."""
    found = {str(file.relative_to(path)): file.read_bytes() for file in Path(path).rglob("*") if file.is_file()}
    return {name: data for name, data in found.items() if name != "ckptstore.json"}


@settings(deadline=None, max_examples=min(60, settings.default.max_examples))
@given(states=_STATES, ways=_WAYS, in_background=st.booleans(), repeats=st.integers(1, 2))
@example([{"a": "floats"}, {"a": "turned"}, {"a": "as many bytes"}], [{}], False, 1)
@example([{"a": "floats", "b": "tied"}, {"a": "floats", "b": "floats"}, {"b": "floats", "a": "tied"}], [{}], False, 1)
@example([{"a": "floats"}, {"a": "turned"}, {"a": "floats"}], [{}, None, {}], True, 2)
def test_every_file_is_what_a_new_store_writes(
    states: list[dict[str, Any]], ways: list[Any], in_background: bool, repeats: int
) -> None:
    with tempfile.TemporaryDirectory() as place, open_store(f"{place}/kept", durable=False) as kept:
        step, every_way = 0, cycle(ways)
        for parts in states:
            for _ in range(repeats):  # the second time with other numbers
                state, step, options = made(parts), step + 1, next(every_way)
                if options is None:
                    with pytest.raises(InvalidState):
                        kept.save(step, {**state, "odd": object()})
                    continue
                found = saved(kept, step, state, options, in_background=in_background)
                loaded = made(parts)
                found.load(loaded)
                assert torch.equal(torch.cat(numbers(loaded)), torch.cat(numbers(state)))
                if "incremental" not in options:  # which takes files over, or refers to them
                    with open_store(f"{place}/{step}", durable=False) as new:
                        assert files_of(found.uri) == files_of(new.save(step, state, **options).uri)


def saved(store: Any, step: int, state: dict[str, Any], options: Any, *, in_background: bool) -> Any:
    if not in_background:
        return store.save(step, state, **options)
    return store.save_async(step, state, **options).result()


def numbers(state: dict[str, Any]) -> list[torch.Tensor]:
    """All tensors of a state one after another, in the order of its keys, each with its shape."""
    found = [torch.zeros(0, dtype=torch.float64)]
    for _, value in sorted(state["state"].items()):
        if isinstance(value, torch.Tensor):
            found += [torch.tensor(value.shape, dtype=torch.float64), value.reshape(-1).to(torch.float64)]
    return found


def test_the_same_structure_is_planned_and_listed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made_of: list[str] = []

    def counted(name: str, function: Any) -> Any:
        return lambda *args, **keywords: made_of.append(name) or function(*args, **keywords)

    made_once = {"plan_rank": assignment, "Outliner": assignment, "stock_metadata": stock_write}
    for name, module in made_once.items():
        monkeypatch.setattr(module, name, counted(name, getattr(module, name)))
    with open_store(tmp_path / "store") as store:
        for step in range(3):
            store.save(step, {"w": torch.rand(10), "step": step})
        assert made_of == [*made_once]
        store.save(3, {"w": torch.rand(11), "step": 3})
        assert made_of == [*made_once] * 2


def test_no_tensor_is_held(tmp_path: Path) -> None:
    with open_store(tmp_path / "store") as store:
        tensor = torch.rand(1000)
        held = weakref.ref(tensor)
        for step in range(2):
            store.save(step, {"w": tensor})
        del tensor
        gc.collect()
        assert held() is None


def test_no_index_is_held(tmp_path: Path) -> None:
    def num_indexes() -> int:
        gc.collect()
        return sum(type(item) is TensorIndex for item in gc.get_objects())

    before = num_indexes()
    with open_store(tmp_path / "store") as store:
        store.save(1, {"w": torch.rand(10), "x": torch.rand(10)})
        assert num_indexes() == before


def test_items_are_compared_by_all_but_what_they_hold() -> None:
    item = Item("key", Mode.VALUE, digest=b"one")
    (one,), (other,) = without_digests([item]), without_digests([item._replace(digest=b"other")])
    assert one == other
    for name, value in {"key": "other", "mode": Mode.SPLIT, "member": 1, "owner": "x", "tied_to": "x"}.items():
        assert without_digests([item._replace(**{name: value})]) != [one]


def calls_of_saves(root: Path, number: int) -> tuple[int, int]:
    """Return the function calls of a save, and the bytes of its record, with so many live checkpoints besides."""
    with open_store(root, group="solo", durable=False) as store:
        store.save(1, {"epoch": 1})
        for step in range(1000, 1000 + number):
            store.save_directory(step, None)
    calls = 0

    def count(_frame: FrameType, event: str, _what: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    with open_store(root, group="solo", durable=False) as store:
        for step in (9001, 9002):  # the first one reads all records
            store.save(step, {"epoch": 1})
            settle(store)
        sys.setprofile(count)
        try:
            store.save(9003, {"epoch": 1})
        finally:
            sys.setprofile(None)
        settle(store)
        with pytest.raises(StepExists):
            store.save(1000, {"epoch": 1}, exists="error")
        store.save(1000, {"epoch": 1})
        assert [checkpoint.step for checkpoint in store].count(1000) == 1
        newest = store._job.log.newest()
        return calls, len(newest.encode())


def test_a_save_costs_the_same_with_many_live_checkpoints(tmp_path: Path) -> None:
    few, few_bytes = calls_of_saves(tmp_path / "few", 10)
    many, many_bytes = calls_of_saves(tmp_path / "many", 400)
    assert many < few + 100
    assert many_bytes < few_bytes + 100
