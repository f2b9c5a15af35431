"""Creation of wrapper tensors that an optimizer does not have yet, of classes that the optimizer's own module names."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

import torch

from ckptstore.errors import InvalidState, StateMismatch
from ckptstore.state.live.matching import Matching
from ckptstore.state.tensors.placement import is_dtensor, pieces_of
from ckptstore.state.tensors.wrapped import Label, Wrapped, key_of_part, unwrap


def made_wrapper(matching: Matching, key: str, parameter: torch.Tensor, optimizer: type) -> torch.Tensor:
    """Return a tensor like the one that was saved under a key, for a parameter's state, to be filled.

    Its class must be in the module of the optimizer's class, or of one that this inherits from: a checkpoint chooses
    none. Raises StateMismatch when it is not, or cannot be made from the saved one.
    """
    if not is_dtensor(parameter):
        return _made(matching, key, _saved(matching, key, key, parameter.shape), parameter.device, optimizer)
    found = {}
    for piece in pieces_of(parameter, key):
        name = key_of_part(key, piece.box.offsets)
        saved = _saved(matching, key, name, piece.box.sizes)
        found[name] = _made(matching, name, saved, parameter.device, optimizer)
    if len(found) != 1:
        raise StateMismatch(f"{key} wraps tensors, and this rank has no one part of it", hint=_HINT)
    from torch.distributed.tensor import DTensor

    (local,) = found.values()
    return DTensor.from_local(
        local, parameter.device_mesh, parameter.placements, shape=parameter.shape, stride=parameter.stride()
    )


_HINT = "Let the optimizer step once before loading"
_NAMED = ("torch.dtype", "torch.layout", "torch.memory_format")
"""Kinds of plain values that are attributes of torch, by their names."""


def _saved(matching: Matching, key: str, name: str, shape: Sequence[int]) -> Wrapped:
    saved = matching.saved.values.get(name)
    if not isinstance(saved, Wrapped) or saved.label.shape != tuple(shape):
        raise StateMismatch(f"{key} was saved in other parts than those of the state", hint=_HINT)
    return saved


def _made(matching: Matching, key: str, saved: Wrapped, device: torch.device, optimizer: type) -> torch.Tensor:
    label = saved.label
    named = [
        vars(sys.modules[kind.__module__]).values() for kind in optimizer.__mro__ if kind.__module__ in sys.modules
    ]
    classes = {f"{item.__module__}.{item.__qualname__}": item for items in named for item in items if _is_tensor(item)}
    kind: Any = classes.get(label.kind)
    if kind is None or not hasattr(kind, "__tensor_unflatten__"):
        raise StateMismatch(f"{key} is a {label.kind}, and the optimizer has no state to load it into", hint=_HINT)
    inner = {name: _inner(matching, f"{key}.{name}", item, device, optimizer) for name, item in saved.items()}
    stride = torch.empty(label.shape, device="meta").stride()
    try:
        made: torch.Tensor = kind.__tensor_unflatten__(inner, _context(label), torch.Size(label.shape), stride)
        same = _without_part(unwrap(made, key).label) == _without_part(label)
    except Exception as error:  # the class is the user's, and so are its errors
        raise StateMismatch(f"{key} cannot be made from what was saved: {error}", hint=_HINT) from error
    if not same:
        raise StateMismatch(f"{key} cannot be made from what was saved", hint=_HINT)
    return made


def _is_tensor(item: Any) -> bool:
    return isinstance(item, type) and issubclass(item, torch.Tensor)


def _inner(matching: Matching, key: str, saved: Any, device: torch.device, optimizer: type) -> torch.Tensor:
    if isinstance(saved, Wrapped):
        return _made(matching, key, saved, device, optimizer)
    entry = matching.saved.tensors[matching.saved.aliases.get(saved.key, saved.key)]
    return torch.empty(entry.shape, dtype=entry.torch_dtype, device=device)


def _context(label: Label) -> Any:
    """Return the argument of `__tensor_unflatten__` beside the inner tensors, from the text that describes it."""
    return _decoded(json.loads(label.context))


def _decoded(item: Any) -> Any:
    if isinstance(item, list):
        return tuple(map(_decoded, item))  # mostly shapes, which torch takes as tuples
    if not isinstance(item, dict):
        return item
    if not any("." in name for name in item):
        return {name: _decoded(value) for name, value in item.items()}
    ((kind, value),) = item.items()
    if kind == "builtins.float":
        return float.fromhex(value)
    named = getattr(torch, value.removeprefix("torch."), None) if kind in _NAMED else None
    if named is None or f"torch.{type(named).__name__}" != kind:
        raise InvalidState(f"it has a {kind} beside its tensors, which is no plain value")
    return named


def _without_part(label: Label) -> tuple[Any, ...]:
    return label.kind, label.context, label.dtype, label.shape
