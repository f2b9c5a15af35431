"""Memory that several names lead to: which tensors are one, which overlap, and what a load does then."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import ckptstore
from ckptstore import InvalidState, StateMismatch
from ckptstore.state.tensors.overlap import identity_of, overlaps_itself, shared_memory

ROOM = 48
"""Elements of the storage of which views are drawn."""


@st.composite
def views(draw: st.DrawFn, *, dtype: torch.dtype = torch.int32) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Offset, sizes and strides of a view of a storage of `ROOM` elements."""
    sizes = draw(st.lists(st.integers(1, 3), max_size=3).map(tuple))
    strides = tuple(draw(st.integers(0, 6)) for _ in sizes)
    reach = sum((size - 1) * step for size, step in zip(sizes, strides, strict=True))
    return draw(st.integers(0, ROOM - 1 - reach)), sizes, strides


def view(storage: torch.Tensor, drawn: tuple[int, tuple[int, ...], tuple[int, ...]]) -> torch.Tensor:
    offset, sizes, strides = drawn
    return storage.as_strided(sizes, strides, offset)


def places(storage: torch.Tensor, tensor: torch.Tensor) -> list[int]:
    """For each element in its order, where in the storage it lies; by the library's own indexing."""
    numbered = torch.arange(ROOM).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    return numbered.reshape(-1).tolist()


@given(views())
def test_a_tensor_overlaps_itself_if_two_elements_have_one_place(drawn: Any) -> None:
    tensor = view(torch.zeros(ROOM), drawn)
    found = places(tensor, tensor)
    assert overlaps_itself(tensor) == (len(set(found)) < len(found))


@given(views(), views())
def test_two_tensors_are_one_if_each_element_has_the_same_place(first: Any, second: Any) -> None:
    storage = torch.zeros(ROOM)
    for one, other in ((first, second), (first, first)):
        a, b = view(storage, one), view(storage, other)
        are_same = a.shape == b.shape and places(storage, a) == places(storage, b)
        if identity_of(a) == identity_of(b):
            assert are_same
        elif not overlaps_itself(a):  # of a dimension with stride 0, others may stand for the same
            assert not are_same


def test_what_shows_other_numbers_of_the_same_memory_is_another_tensor() -> None:
    x = torch.tensor([1 + 2j, 3 - 4j])
    shown = [x, x.conj(), x.imag, x.conj().imag, x.real, x.view(torch.int64), x[:1], x.view(1, 2), x.view(2, 1)]
    assert all(identity_of(a) != identity_of(b) for a, b in combinations(shown, 2))
    assert identity_of(x.conj()) == identity_of(x.conj())
    assert identity_of(x.view(1, 2)) == identity_of(x.as_strided((1, 2), (7, 1)))
    parameter = nn.Parameter(torch.ones(2))
    assert identity_of(parameter) == identity_of(parameter.detach())
    freed, other = torch.ones(3), torch.ones(3)
    for tensor in (freed, other):
        tensor.untyped_storage().resize_(0)
    assert identity_of(freed) != identity_of(other), "memory that was given back is nobody's"


def test_views_with_other_shapes_and_dtypes_are_stored_for_themselves(tmp_path: Path) -> None:
    base = torch.arange(6.0)
    others = {"part": base[:3], "shaped": base.view(2, 3), "bits": base.view(torch.int32)}
    state = {"a": base, "again": base.view(6), "none": torch.empty(0), **others, "turned": torch._neg_view(base)}
    with ckptstore.open_store(tmp_path) as store:
        found = store.save(1, state).to_dict()
    for key, tensor in state.items():
        assert found[key].dtype == tensor.dtype, key
        assert torch.equal(found[key], tensor), key
    assert found["a"].data_ptr() == found["again"].data_ptr(), "they are tied"


@given(st.lists(views(), min_size=2, max_size=7), st.booleans())
def test_all_memory_in_common_is_found(drawn: list[Any], are_halves: bool) -> None:
    storage = torch.zeros(ROOM, dtype=torch.int32)
    tensors = [tensor for item in drawn if not overlaps_itself(tensor := view(storage, item))]
    if are_halves and tensors:  # another dtype over the same bytes
        tensors.append(storage.view(torch.int16)[7:21:2])
    taken = [_bytes_of(tensor) for tensor in tensors]
    pairs = list(shared_memory(tensors))
    for first, second, is_same in pairs:
        assert first < second
        assert taken[first] & taken[second]
        assert is_same == (identity_of(tensors[first]) == identity_of(tensors[second]))
    assert _linked(pairs, len(tensors)) == _linked(
        [(a, b, False) for a, b in combinations(range(len(tensors)), 2) if taken[a] & taken[b]], len(tensors)
    )


def _bytes_of(tensor: torch.Tensor) -> set[int]:
    """The addresses of all bytes of all elements."""
    offsets = [0]
    for size, step in zip(tensor.shape, tensor.stride(), strict=True):
        offsets = [offset + index * step for offset in offsets for index in range(size)]
    size = tensor.element_size()
    return {tensor.data_ptr() + offset * size + byte for offset in offsets for byte in range(size)}


def _linked(pairs: Any, count: int) -> list[int]:
    """For each tensor the first one that it hangs together with."""
    first = list(range(count))
    for a, b, _ in pairs:
        low, high = sorted((first[a], first[b]))
        first = [low if item == high else item for item in first]
    return first


def test_shared_memory_of_many_tensors_takes_time_for_sorting_alone() -> None:
    flat = torch.zeros(20_000, 4)
    tensors = list(flat.unbind())
    assert not list(shared_memory(tensors))
    assert len(list(shared_memory([*tensors, *tensors]))) == 20_000


def stored(directory: Path, state: Any) -> Any:
    with ckptstore.open_store(directory / "store", group="solo") as store:
        return store.save(store.latest().step + 1 if store.latest() else 0, state)


@settings(max_examples=min(40, settings.default.max_examples), deadline=None)
@given(drawn=st.lists(views(), min_size=1, max_size=5), seed=st.integers(0, 99), is_tied=st.booleans())
def test_views_load_into_views_or_nothing_changes(
    tmp_path_factory: pytest.TempPathFactory, drawn: list[Any], seed: int, is_tied: bool
) -> None:
    """The numbers of a state whose tensors are views load into such views. Those of tensors on their own do so if they
    agree wherever the memory is the same; else both names are said and nothing is written."""
    torch.manual_seed(seed)
    drawn = [item for item in drawn if not overlaps_itself(view(torch.zeros(ROOM), item))]
    source, target = torch.randint(9, (ROOM,)), torch.full((ROOM,), -1)
    saved = {f"t{number}": view(source, item) for number, item in enumerate(drawn)}
    if not is_tied:
        saved = {key: torch.randint(2, tensor.shape) for key, tensor in saved.items()}
    state = {f"t{number}": view(target, item) for number, item in enumerate(drawn)}
    expected, agree = target.clone(), True
    for tensor, item in zip(saved.values(), drawn, strict=True):
        view(expected, item).copy_(tensor)
    for tensor, item in zip(saved.values(), drawn, strict=True):
        agree &= torch.equal(view(expected, item), tensor)
    with ckptstore.open_store(tmp_path_factory.mktemp("views"), group="solo") as store:
        store.save(0, saved)
        if agree:
            store.load(state)
            assert torch.equal(target, expected)
        else:
            with pytest.raises(StateMismatch, match=r"t\d .*memory.* t\d in the state"):
                store.load(state)
            assert (target == -1).all()


class Pair(nn.Module):
    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        if tied:
            self.head.weight = self.embedding.weight


def test_an_untied_checkpoint_loads_into_a_tied_model_only_if_both_are_equal(tmp_path: Path) -> None:
    untied, tied = Pair(tied=False), Pair(tied=True)
    before = tied.head.weight.detach().clone()
    checkpoint = stored(tmp_path, {"m": untied})
    for strict in (True, False):
        with pytest.raises(StateMismatch, match=r"m\.head\.weight is the same memory as m\.embedding\.weight"):
            checkpoint.load({"m": tied}, strict=strict)
    assert torch.equal(tied.head.weight, before)
    checkpoint.load({"m": tied}, include="m.head.*")
    assert torch.equal(tied.embedding.weight, untied.head.weight)
    with torch.no_grad():
        untied.head.weight.copy_(untied.embedding.weight)
    stored(tmp_path, {"m": untied}).load({"m": tied})
    assert torch.equal(tied.head.weight, untied.head.weight)


def test_modules_that_share_a_tensor_now_get_it_once(tmp_path: Path) -> None:
    actor, critic = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
    checkpoint = stored(tmp_path, {"actor": actor, "critic": critic, "average": actor.weight + 1})
    one, other = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
    other.weight = one.weight
    before = one.weight.detach().clone()
    with pytest.raises(StateMismatch, match=r"critic\.weight is the same memory as actor\.weight"):
        checkpoint.load({"actor": one, "critic": other})
    with pytest.raises(StateMismatch, match=r"average is the same memory as actor\.weight"):
        checkpoint.load({"actor": one, "average": one.weight.data})
    with pytest.raises(StateMismatch, match=r"average has memory in common with actor\.weight"):
        checkpoint.load({"actor": one, "average": one.weight.data.t()})
    assert torch.equal(one.weight, before)
    checkpoint.load({"actor": one, "critic": other}, include="critic.*")
    assert torch.equal(one.weight, critic.weight)
    stored(tmp_path, {"actor": actor, "critic": actor}).load({"actor": one, "critic": other})
    assert torch.equal(other.weight, actor.weight)


def test_tied_weights_of_a_cast_must_agree_in_the_dtype_of_the_state(tmp_path: Path) -> None:
    untied, tied = Pair(tied=False), Pair(tied=True).bfloat16()
    with torch.no_grad():
        untied.head.weight.copy_(untied.embedding.weight.bfloat16())
    checkpoint = stored(tmp_path, {"m": untied})
    checkpoint.load({"m": tied}, dtype="state")
    assert torch.equal(tied.head.weight, untied.head.weight.bfloat16())


def test_an_optimizer_state_that_is_another_tensor_too_is_filled_once(tmp_path: Path) -> None:
    def make() -> dict[str, Any]:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model(torch.rand(3, 2)).sum().backward()
        optimizer.step()
        momentum = optimizer.state[model.weight]["momentum_buffer"]
        return {"model": model, "optim": optimizer, "momentum": momentum}

    saved, state = make(), make()
    stored(tmp_path, saved).load(state)
    assert torch.equal(state["momentum"], saved["momentum"])
    saved["momentum"] = saved["momentum"] + 1
    with pytest.raises(StateMismatch, match="momentum"):
        stored(tmp_path, saved).load(state)


@pytest.mark.parametrize("target", [torch.zeros(4).expand(3, 4), torch.zeros(20).as_strided((3, 4), (2, 1))])
def test_a_target_that_overlaps_itself_is_refused_by_key_and_not_written_to(
    tmp_path: Path, target: torch.Tensor
) -> None:
    checkpoint = stored(tmp_path, {"first": torch.ones(9), "table": target + 1})
    first = torch.zeros(9)
    with pytest.raises(StateMismatch, match="table has several elements in the same memory"):
        checkpoint.load({"first": first, "table": target})
    assert not first.any()
    assert not target.any()


class Holder:
    """As an average that keeps whatever it is given."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def state_dict(self) -> dict[str, Any]:
        return {"tensor": self.tensor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tensor = state["tensor"]


def test_an_object_with_a_state_dict_gets_a_new_tensor_for_one_that_overlaps_itself(tmp_path: Path) -> None:
    holder = Holder(torch.zeros(4).expand(3, 4))
    stored(tmp_path, {"h": Holder(torch.arange(12.0).reshape(3, 4))}).load({"h": holder})
    assert torch.equal(holder.tensor, torch.arange(12.0).reshape(3, 4))


def test_one_tensor_at_several_places_of_an_object_is_one_again(tmp_path: Path) -> None:
    tensor = torch.arange(3.0)
    holder: Any = Holder(torch.zeros(1))
    stored(tmp_path, {"h": Holder([tensor, {"again": tensor}, tensor.clone()])}).load({"h": holder})  # type: ignore[arg-type]
    first, inner, other = holder.tensor
    assert inner["again"] is first
    assert other is not first
    assert torch.equal(first, tensor)
    assert torch.equal(other, tensor)


EYE = torch.eye(3)
UNUSUAL: dict[str, Callable[[], torch.Tensor]] = {
    "lazy": lambda: nn.LazyLinear(3).weight,
    "nested": lambda: torch.nested.nested_tensor([EYE, EYE[:2]]),
    "jagged": lambda: torch.nested.nested_tensor([EYE, EYE[:2]], layout=torch.jagged),
    "quantised": lambda: torch.quantize_per_tensor(EYE, 0.1, 0, torch.qint8),
    "sparse_coo": EYE.to_sparse,
    "sparse_csr": EYE.to_sparse_csr,
    "mkldnn": EYE.to_mkldnn,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", UNUSUAL)
def test_kinds_of_tensors_that_cannot_be_stored_are_refused_by_key(tmp_path: Path, kind: str) -> None:
    tensor = UNUSUAL[kind]()
    module = nn.Module()
    if kind == "lazy":
        module.odd = nn.LazyLinear(3)
    else:
        module.register_buffer("odd", tensor)
    states = [{"odd": tensor}, {"more": {"odd": [tensor]}}, {"m": module}, {"h": Holder(tensor)}]
    with ckptstore.open_store(tmp_path, group="solo") as store:
        for state in states:
            with pytest.raises(InvalidState, match=r"(odd|h\.tensor).* is (lazy|a).*cannot be stored"):
                store.save(0, state)
        assert store.latest() is None
        plain = nn.Module()
        plain.odd = nn.Linear(3, 3) if kind == "lazy" else nn.Buffer(EYE.clone())
        saved = [{"odd": EYE}, {"more": {"odd": [EYE]}}, {"m": plain}, {"h": Holder(EYE)}]
        for step, (state, target) in enumerate(zip(saved, states, strict=True)):
            store.save(step, {**state, "first": torch.ones(2)})
            first = torch.zeros(2)
            if "h" in state:
                store.load(target)
                assert torch.equal(target["h"].tensor, EYE)
                continue
            with pytest.raises(StateMismatch, match=r"odd.* is (lazy|a).* in the state, which cannot be loaded into"):
                store.load({**target, "first": first})
            assert not first.any()


def test_an_object_whose_tensor_is_a_parameter_now_gets_one_of_its_own(tmp_path: Path) -> None:
    """As an average of weights that begins as the weights themselves."""
    model, average = nn.Linear(2, 2), Holder(torch.full((2, 2), 7.0))
    checkpoint = stored(tmp_path, {"model": model, "average": average})
    for shared in (lambda weight: weight.data, lambda weight: weight.data.t()):
        again = nn.Linear(2, 2)
        holder = Holder(shared(again.weight))
        checkpoint.load({"average": holder, "model": again})
        assert torch.equal(again.weight, model.weight)
        assert torch.equal(holder.tensor, average.tensor)
