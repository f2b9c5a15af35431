"""Modules that go by the notes of state dicts: versions, names of old, hooks. `UPGRADED` has what became of some: a
program that loads may have the later form of what another one saved."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from ckptstore.runtime.torch_private import metadata_of

WIDTH = 6


class _Scaled(nn.Module):
    """Keeps the logarithm of its scale."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(WIDTH))
        self.shift = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale.exp() + self.shift


class _ScaledLater(_Scaled):
    """Keeps the scale."""

    _version = 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale + self.shift

    def _load_from_state_dict(self, state: Any, prefix: str, notes: Any, *rest: Any) -> None:
        if notes.get("version", 1) < 2 and f"{prefix}scale" in state:
            state[f"{prefix}scale"] = state[f"{prefix}scale"].exp()
        super()._load_from_state_dict(state, prefix, notes, *rest)


class _SwappedLater(_Scaled):
    """Has its two entries the other way round."""

    _version = 3

    def _load_from_state_dict(self, state: Any, prefix: str, notes: Any, *rest: Any) -> None:
        one, other = f"{prefix}scale", f"{prefix}shift"
        if notes.get("version", 1) < 3 and one in state and other in state:
            state[one], state[other] = state[other], state[one]
        super()._load_from_state_dict(state, prefix, notes, *rest)


class _FusedLater(nn.Module):
    """Has both in one entry."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Parameter(torch.rand(2, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.both[0].exp() + self.both[1]

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        if f"{prefix}scale" in state and f"{prefix}shift" in state:
            state[f"{prefix}both"] = torch.stack([state.pop(f"{prefix}{name}") for name in ("scale", "shift")])
        super()._load_from_state_dict(state, prefix, *rest)


class _Flat(nn.Module):
    """Has its matrix as a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH * WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.reshape(WIDTH, WIDTH)


class _FlatLater(_Flat):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH, WIDTH))
        self._register_load_state_dict_pre_hook(self._fold)  # type: ignore[no-untyped-call]

    @staticmethod
    def _fold(state: Any, prefix: str, *_: Any) -> None:
        if f"{prefix}weight" in state:
            state[f"{prefix}weight"] = state[f"{prefix}weight"].reshape(WIDTH, WIDTH)


class _Named(nn.Module):
    """Has a layer, and a buffer that its later form does without."""

    def __init__(self, name: str = "inner", buffer: str = "unused") -> None:
        super().__init__()
        self.add_module(name, nn.Linear(WIDTH, WIDTH))
        self.register_buffer(buffer, torch.rand(2))

    def forward(self, x: torch.Tensor) -> Any:
        return next(self.children())(x)


class _NamedLater(_Named):
    """Has the layer under another name, and a buffer more."""

    def __init__(self) -> None:
        super().__init__("core", "added")
        self.register_load_state_dict_pre_hook(self._rename)  # type: ignore[no-untyped-call]

    @staticmethod
    def _rename(module: Any, state: Any, prefix: str, *_: Any) -> None:
        for name in [name for name in state if name.startswith(f"{prefix}inner.")]:
            state[name.replace(f"{prefix}inner.", f"{prefix}core.")] = state.pop(name)
        if state.pop(f"{prefix}unused", None) is not None:
            state[f"{prefix}added"] = torch.ones(2, device="cpu")


class _Noting(nn.Module):
    """Notes how often it was called, and finds that in a buffer outside of its state after a load."""

    loaded_calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH))
        self.register_buffer("loaded_calls", torch.zeros(()), persistent=False)
        self._calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._calls += 1
        return x * self.weight + self.loaded_calls

    def _save_to_state_dict(self, state: Any, prefix: str, keep: bool) -> None:
        super()._save_to_state_dict(state, prefix, keep)
        metadata_of(state)[prefix[:-1]].update(
            calls=(self._calls, [1.5]), amax=torch.tensor([2.0, -0.0], device="cpu"), dtype=torch.half
        )

    def _load_from_state_dict(self, state: Any, prefix: str, notes: Any, *rest: Any) -> None:
        is_exact = notes.get("dtype") is torch.half and torch.equal(
            notes["amax"], torch.tensor([2.0, 0.0], device="cpu")
        )
        self._calls = notes["calls"][0] if is_exact else -1
        self.loaded_calls.fill_(self._calls)
        super()._load_from_state_dict(state, prefix, notes, *rest)


class _Negating(nn.Module):
    """Stores its weight negated, and says so in a note by a hook of its state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH))
        self.register_state_dict_post_hook(self._negate)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(self._negate_back)  # type: ignore[no-untyped-call]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight

    @staticmethod
    def _negate(module: Any, state: Any, prefix: str, notes: Any) -> None:
        if f"{prefix}weight" in state:  # FSDP1 has its own
            state[f"{prefix}weight"] = -state[f"{prefix}weight"].detach()
            notes["negated"] = True

    @staticmethod
    def _negate_back(module: Any, state: Any, prefix: str, notes: Any, *_: Any) -> None:
        if notes.get("negated") and f"{prefix}weight" in state:
            state[f"{prefix}weight"] = -state[f"{prefix}weight"]


def _weight_norm(*, old: bool = False) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        make: Any = torch.nn.utils.weight_norm if old else torch.nn.utils.parametrizations.weight_norm
        return make(nn.Linear(WIDTH, WIDTH))


NOTING: Mapping[str, Callable[[], nn.Module]] = {
    "log scale": _Scaled,
    "to be swapped": _Scaled,
    "to be fused": _Scaled,
    "flat": _Flat,
    "old names": _Named,
    "old weight norm": lambda: _weight_norm(old=True),
    "noting": _Noting,
    "negating": _Negating,
    "scale": _ScaledLater,
}

UPGRADED: Mapping[str, Callable[[], nn.Module]] = {
    "log scale": _ScaledLater,
    "to be swapped": _SwappedLater,
    "to be fused": _FusedLater,
    "flat": _FlatLater,
    "old names": _NamedLater,
    "old weight norm": _weight_norm,
}
"""The later forms of modules, which take what these saved."""


def state_dict_of_noting() -> Any:
    """Return what the `state_dict()` of modules with versions and notes returns."""
    return nn.Sequential(_Noting(), _ScaledLater()).state_dict()
