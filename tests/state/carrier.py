"""States through a store in memory, and looks at things bit by bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from meshes import new_uri

from ckptstore import Checkpoint, open_store

FITS: tuple[set[str], set[str]] = set(), set()
"""What `load` gives when nothing is missing in the checkpoint, and nothing in it has no place in the state."""


def saved(state: Mapping[str, Any], **options: Any) -> Checkpoint:
    """The checkpoint of a state in a store of its own."""
    with open_store(new_uri(), group="solo") as store:
        return Checkpoint.from_uri(store.save(1, dict(state), **options).uri)


def load(checkpoint: Checkpoint, state: Mapping[str, Any], **keywords: Any) -> tuple[set[str], set[str]]:
    """Load, and return what is missing and what is unexpected."""
    report = checkpoint.load(state, **keywords)  # type: ignore[arg-type]
    return {*report.missing}, {*report.unexpected}


def unchanged_by(action: Callable[[], Any], *things: Callable[[], Any]) -> Any:
    """Run an action between two looks at things, and hold that they are the same bit for bit."""
    before = [bits(thing()) for thing in things]
    result = action()
    assert [bits(thing()) for thing in things] == before
    return result


def bits(value: Any) -> Any:
    """A value in which every tensor is its bytes, for comparing."""
    if isinstance(value, torch.Tensor):
        local = value.to_local() if hasattr(value, "to_local") else value
        if hasattr(local, "__tensor_flatten__"):  # it wraps others
            return type(local).__name__, [bits(getattr(local, name)) for name in local.__tensor_flatten__()[0]]
        data = local.detach().cpu().contiguous().reshape(-1).view(torch.uint8) if local.numel() else torch.empty(0)
        return str(value.dtype), tuple(local.shape), bytes(data.tolist()) if local.numel() else b""
    if isinstance(value, Mapping):
        return type(value).__name__, [(key, bits(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return type(value).__name__, [bits(item) for item in value]
    return value


def training(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[Callable[[], Any]]:
    """Looks at everything that a save must not change."""
    return [
        lambda: [(name, parameter, parameter.grad) for name, parameter in model.named_parameters()],
        lambda: list(model.named_buffers()),
        lambda: [dict(state) for state in optimizer.state.values()],
        lambda: [{**group, "params": len(group["params"])} for group in optimizer.param_groups],
        torch.get_rng_state,
    ]
