"""Tensors that wrap others: what is stored of them, and what they may be loaded into."""

from __future__ import annotations

import copy
import enum
import json
import pickle
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from ckptstore.errors import InvalidState, StateMismatch
from ckptstore.state.live.flatten import TensorRef, join_path, map_tensors
from ckptstore.state.live.values import Decoder, Encoder, references
from ckptstore.state.tensors.wrapped import Wrapped, WrappedPart, check_same, key_of_part, unwrap


class Kernel(enum.Enum):
    FAST = 1
    EXACT = 2


@dataclass
class Options:
    kernel: Kernel = Kernel.FAST
    scale: float = 0.1


class Quantised(torch.Tensor):
    """Shaped as the quantised tensors of libraries are: codes of one dtype, scales of another, and a context."""

    codes: torch.Tensor
    scale: torch.Tensor
    context: Any

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor, context: Any) -> Quantised:
        made: Quantised = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.bfloat16)  # type: ignore[attr-defined]
        made.codes, made.scale, made.context = codes, scale, context
        return made

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], self.context

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], context: Any, *_: Any) -> Quantised:
        return cls(inner["codes"], inner["scale"], context)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} is not needed for a checkpoint")


def quantised(seed: int = 0, context: Any = None) -> Quantised:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-99, 99, (4, 6), dtype=torch.int8, generator=generator)
    return Quantised(codes, torch.rand(4, generator=generator), context)


def test_the_inner_tensors_are_the_live_memory() -> None:
    tensor = quantised()
    found = unwrap(tensor, "w")
    assert list(found) == ["codes", "scale"]
    assert (found.label.dtype, found.label.shape) == ("bfloat16", (4, 6))
    found["codes"].fill_(7)
    assert (tensor.codes == 7).all()


def test_a_wrapper_in_a_wrapper() -> None:
    found = unwrap(TwoTensor(TwoTensor(torch.ones(3), torch.zeros(3)), torch.rand(3)), "w")
    assert isinstance(found["a"], Wrapped)
    assert found["a"]["a"].tolist() == [1, 1, 1]
    assert isinstance(found["b"], torch.Tensor)


@pytest.mark.parametrize(
    "context", [None, 1.5, [True, torch.float32], {"block": (1, 64), "options": Options()}, torch.Size([2])]
)
def test_the_same_context_fits_and_another_does_not(context: Any) -> None:
    saved = unwrap(quantised(context=context), "w")
    check_same(saved, unwrap(quantised(1, context=copy.deepcopy(context)), "w"), "w")
    with pytest.raises(StateMismatch, match="w was saved from another kind"):
        check_same(saved, unwrap(quantised(context=["other"]), "w"), "w")


@pytest.mark.parametrize(
    ("one", "other"),
    [(1, 1.0), (True, 1), ("1", 1), (Options(), Options(Kernel.EXACT)), (Options(), Options(scale=0.2))],
)
def test_contexts_that_differ_differ_in_what_is_stored(one: Any, other: Any) -> None:
    assert unwrap(quantised(context=one), "w").label != unwrap(quantised(context=other), "w").label


def test_other_classes_and_parts_do_not_fit() -> None:
    saved = unwrap(quantised(), "w", WrappedPart("w", (0, 0), (8, 6)))
    for other in (unwrap(quantised(), "w", WrappedPart("w", (4, 0), (8, 6))), unwrap(quantised(), "w")):
        with pytest.raises(StateMismatch, match="part"):
            check_same(saved, other, "w")
    with pytest.raises(StateMismatch, match="TwoTensor"):
        check_same(saved, unwrap(TwoTensor(torch.ones(3), torch.ones(3)), "w"), "w")


class Silent(torch.Tensor):
    """Wraps, and does not say what."""

    @staticmethod
    def __new__(cls) -> Silent:
        made: Silent = torch.Tensor._make_wrapper_subclass(cls, (3,))  # type: ignore[attr-defined]
        return made

    __torch_dispatch__ = Quantised.__torch_dispatch__


class Computed(Quantised):
    """Its codes are made at each look."""

    @property
    def made(self) -> torch.Tensor:
        return self.scale + 1

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["made"], None


@pytest.mark.parametrize(
    ("tensor", "said"),
    [
        (Silent(), "w is a Silent"),
        (quantised(context=object()), "w wraps tensors and has a builtins.object"),
        (Quantised(torch.ones(3), torch.ones(3).to_sparse(), None), "w.scale"),
        (Quantised(torch.ones(3), torch.ones(3, device="meta"), None), "w.scale is a tensor on meta"),
        (Quantised(torch.ones(3), None, None), "w.scale is a NoneType"),  # type: ignore[arg-type]
        (Computed(torch.ones(3), torch.ones(3), None), "w.made is computed each time"),
    ],
)
def test_what_cannot_come_back_is_refused_with_its_key(tensor: torch.Tensor, said: str) -> None:
    with pytest.raises(InvalidState, match=said):
        unwrap(tensor, "w")


def test_it_travels_as_a_plain_value() -> None:
    saved = unwrap(quantised(context=[1, torch.int8]), "w", WrappedPart("w", (4, 0), (8, 6)))
    keys: dict[int, str] = {id(tensor): f"w.{name}" for name, tensor in saved.items()}
    text = json.dumps(Encoder(lambda tensor: keys[id(tensor)]).encode(saved, path="w"))
    assert list(references(json.loads(text))) in (["w.codes", "w.scale"], ["w.scale", "w.codes"])
    read = Decoder(TensorRef).decode(json.loads(text), path="w")
    assert isinstance(read, Wrapped)
    assert read == Wrapped({"codes": TensorRef("w.codes"), "scale": TensorRef("w.scale")}, saved.label)
    check_same(read, saved, "w")


def test_it_is_a_container_of_tensors_for_whoever_walks_states() -> None:
    saved = unwrap(quantised(), "w")
    seen: list[str] = []
    mapped = map_tensors(saved, ("w",), lambda key, leaf: seen.append(key) or TensorRef(key))  # type: ignore[func-returns-value]
    assert seen == ["w.codes", "w.scale"]
    assert mapped == Wrapped({"codes": TensorRef("w.codes"), "scale": TensorRef("w.scale")}, saved.label)
    assert mapped.label is saved.label
    assert pickle.loads(pickle.dumps(mapped)) == mapped


def test_keys_of_parts() -> None:
    assert key_of_part("model.w", (4, 0)) == "model.w@4,0"
    assert join_path(("model", key_of_part("w", (4,)), "codes")) == "model.w@4.codes"
