"""Tensor subclasses that keep their numbers in other tensors: quantised weights and optimizer states, for instance.

Such a tensor is stored as its inner tensors. Each of them is a tensor of the checkpoint, under the key of the outer one
and the name of the attribute. A plain value describes the wrapper: a `Wrapped`, which is a dict of the inner tensors
with a label. A load builds nothing from it. It fills the inner tensors of a tensor that the caller has, if that one has
the same label. So no class is imported and no code runs because a checkpoint names it. Loading this module does not
load torch.
"""

from __future__ import annotations

import dataclasses
import enum
import json
from typing import Any, NamedTuple

from ckptstore.errors import InvalidState, StateMismatch
from ckptstore.runtime.torch_private import is_wrapper


class WrappedPart(NamedTuple):
    """The box of a distributed tensor that a wrapped tensor is."""

    of: str
    """The key of the distributed tensor."""
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    """The shape of the whole."""


@dataclasses.dataclass(frozen=True, slots=True)
class Label:
    """The properties that must be equal in the saved tensor and the one that is loaded into."""

    kind: str
    """The class, with its module."""
    context: str
    """The context that the class keeps beside its inner tensors, as JSON. It is compared, never turned back into
    objects."""
    dtype: str
    """torch's name, without the module, of the dtype that the tensor shows, whatever its inner tensors have."""
    shape: tuple[int, ...]
    part: WrappedPart | None = None


class Wrapped(dict[str, Any]):
    """The inner tensors of a wrapper subclass by the names of their attributes, with its label.

    An item is a plain tensor, another Wrapped, or a placeholder for a tensor in a value that was read.
    """

    def __init__(self, tensors: dict[str, Any], label: Label) -> None:
        super().__init__(tensors)
        self.label = label

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Wrapped) and self.label == other.label and dict.__eq__(self, other)

    __hash__ = None


def key_of_part(key: str, offsets: tuple[int, ...]) -> str:
    """Return the key of the value that stands for one box of a distributed tensor whose local tensors are wrapped."""
    return f"{key}@{','.join(map(str, offsets))}"


def unwrap(tensor: Any, key: str, part: WrappedPart | None = None) -> Wrapped:
    """Return the inner tensors of a wrapper subclass: the live memory, detached, for saving it or for loading into it.

    `part` says that it is a box of a distributed tensor. Raises InvalidState, with the key, for a subclass that does
    not name its inner tensors, wraps anything but dense plain tensors, or has a context that cannot be compared.
    """
    kind = type(tensor)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if not is_wrapper(tensor):
        raise InvalidState(
            f"{key} is a {kind.__name__}, which keeps its numbers elsewhere and does not say where",
            hint="Store the tensors it is made of, or give the class __tensor_flatten__",
        )
    attributes, context = tensor.__tensor_flatten__()
    tensors = {attribute: _inner(tensor, attribute, f"{key}.{attribute}") for attribute in attributes}
    told = json.dumps(_described(context, key), separators=(",", ":"), sort_keys=True)
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Wrapped(tensors, Label(name, told, dtype, tuple(tensor.shape), part))


def check_same(saved: Wrapped, target: Wrapped, key: str) -> None:
    """Raise StateMismatch, with the key, unless the saved tensor can be read into the inner tensors of the target.

    The dtypes and shapes of the inner tensors are not compared: the caller that fills them does.
    """
    if saved.label != target.label or saved.keys() != target.keys():
        differing = [
            f"{field.name} {getattr(saved.label, field.name)!r} against {getattr(target.label, field.name)!r}"
            for field in dataclasses.fields(Label)
            if getattr(saved.label, field.name) != getattr(target.label, field.name)
        ]
        raise StateMismatch(
            f"{key} was saved from another kind of tensor than it is loaded into: "
            f"{', '.join(differing) or f'{sorted(saved)} against {sorted(target)}'}",
            hint="Load it into a tensor that was made as the saved one was",
        )
    for name, inner in saved.items():
        if isinstance(inner, Wrapped) != isinstance(target[name], Wrapped):
            raise StateMismatch(f"{key}.{name} is wrapped in the checkpoint or in the state, and not in the other")
        if isinstance(inner, Wrapped):
            check_same(inner, target[name], f"{key}.{name}")


def _inner(tensor: Any, attribute: str, key: str) -> Any:
    import torch

    inner = getattr(tensor, attribute, None)
    if not isinstance(inner, torch.Tensor):
        raise InvalidState(f"{key} is a {type(inner).__name__}, where a wrapper tensor promises a tensor")
    if type(inner) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        if hasattr(inner, "placements") or hasattr(inner, "local_shards"):
            raise InvalidState(f"{key} is distributed inside of a wrapper tensor", hint="Distribute the wrapper tensor")
        return unwrap(inner, key)
    if inner.layout is not torch.strided or inner.is_quantized or inner.is_meta:
        raise InvalidState(f"{key} is a tensor on {inner.device} with the layout {inner.layout}", hint="Make it dense")
    if inner.numel() and inner.data_ptr() != getattr(tensor, attribute).data_ptr():
        raise InvalidState(f"{key} is computed each time it is read, so no load could fill it")
    return inner.detach()


def _described(context: Any, key: str) -> Any:
    """Return a context as JSON in which different contexts differ."""
    import torch

    if context is None or type(context) in (bool, int, str):
        return context
    if type(context) in (list, tuple):
        return [_described(item, key) for item in context]
    if type(context) is torch.Size:
        return list(context)
    if type(context) is dict and all(type(name) is str for name in context):
        return {name: _described(item, key) for name, item in context.items()}
    kind = f"{type(context).__module__}.{type(context).__qualname__}"
    if type(context) is float:
        return {kind: context.hex()}
    if isinstance(context, torch.dtype | torch.layout | torch.memory_format):
        return {kind: str(context)}
    if isinstance(context, torch.device):
        return {kind: context.type}
    if isinstance(context, enum.Enum):
        return {kind: context.name}
    if dataclasses.is_dataclass(context) and not isinstance(context, type):
        fields = {field.name: getattr(context, field.name) for field in dataclasses.fields(context)}
        return {kind: _described(fields, key)}
    raise InvalidState(
        f"{key} wraps tensors and has a {kind} beside them, which cannot be compared with what it is loaded into",
        hint="Store the tensors it is made of",
    )
