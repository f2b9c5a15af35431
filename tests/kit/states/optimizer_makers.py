"""Optimizers for states: all of torch.optim that step on a CPU, and small ones with uncommon state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer


class _Plain(Optimizer):
    """Steps by SGD; the subclasses add uncommon state."""

    def __init__(self, params: Any, **defaults: Any) -> None:
        super().__init__(params, {"lr": 0.05, **defaults})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
                    parameter.add_(parameter.grad, alpha=-float(group["lr"]))
        return loss

    def _update(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        """Create or change the state of one parameter."""


class _LateState(_Plain):
    """Has no state for a parameter before its first gradient that is not zero."""

    def _update(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        assert parameter.grad is not None
        if parameter.grad.abs().sum() > 0:
            state = self.state[parameter]
            state.setdefault("z", torch.zeros_like(parameter)).add_(parameter.grad)
            state["count"] = state.get("count", 0) + 1


class _ListsInState(_Plain):
    """Has lists, tuples, dicts and None in its state, as optimizers with preconditioners do."""

    def _update(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        assert parameter.grad is not None
        state, grad = self.state[parameter], parameter.grad
        if not state:
            state.update(GG=[torch.zeros(2, 2, dtype=grad.dtype), None], shape=tuple(grad.shape), Q=None)
            state["pair"] = (torch.zeros_like(grad), 0)
        state["GG"][0] += grad.sum()
        state["pair"] = (state["pair"][0] + grad, state["pair"][1] + 1)
        state["Q"] = {"q": grad.clone()}


class _GlobalItem(_Plain):
    """Stores an item for all parameters in its state, and one in its groups."""

    def _update(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        state: Any = self.state
        state["all"] = {"steps": state.get("all", {"steps": 0})["steps"] + 1}
        group["d"] = float(group.get("d", 1.0)) * 0.5


class _SharedState(_Plain):
    """Counts all steps of all parameters in one tensor, which is in the state of each."""

    def _update(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        first = self.state[self.param_groups[0]["params"][0]]
        step = self.state[parameter].setdefault("step", first.get("step", torch.zeros((), device="cpu")))
        step += 1
        group["lr"] = 0.1 / float(step)


class _ExtraEntry(_Plain):
    """Adds an entry besides `state` and `param_groups`, and needs it to load."""

    def __init__(self, params: Any) -> None:
        self.outer = 0
        super().__init__(params)
        self.register_state_dict_post_hook(lambda _, state: {**state, "outer": self.outer})
        self.register_load_state_dict_pre_hook(self._take_outer)

    def _take_outer(self, _: Any, state: dict[str, Any]) -> dict[str, Any]:
        self.outer = state["outer"]
        return {key: value for key, value in state.items() if key != "outer"}

    def _update(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        self.outer += 1
        self.state[parameter]["buffer"] = parameter.grad.clone()  # type: ignore[union-attr]


class _CountingSteps(_Plain):
    """Counts its steps in an attribute, as optimizers with a warm-up do; a load must not step."""

    steps = 0

    def _update(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        self.steps += 1
        self.state[parameter]["momentum"] = parameter.grad.clone()  # type: ignore[union-attr]


def _matrices(params: Iterable[Any]) -> list[Any]:
    """Return the parameters with two dimensions, with their names if they have them."""
    return [each for each in params if (each[1] if isinstance(each, tuple) else each).dim() == 2]


def _zero_redundancy(params: Any) -> Optimizer:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(params, optimizer_class=torch.optim.Adam, lr=0.01)


_Make = Callable[[Any], Optimizer]
OPTIMIZERS: Mapping[str, _Make] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "sgd momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01),
    "adam amsgrad": lambda params: torch.optim.Adam(params, lr=0.01, amsgrad=True),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    "adamw foreach": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=True),
    "adamax": lambda params: torch.optim.Adamax(params, lr=0.01),
    "adadelta": lambda params: torch.optim.Adadelta(params),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.01),
    "asgd": lambda params: torch.optim.ASGD(params, lr=0.01),
    "nadam": lambda params: torch.optim.NAdam(params, lr=0.01),
    "radam": lambda params: torch.optim.RAdam(params, lr=0.01),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.01, momentum=0.5, centered=True),
    "rprop": lambda params: torch.optim.Rprop(params, lr=0.01),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=0.01),
    "muon": lambda params: torch.optim.Muon(params, lr=0.01),
    "lbfgs": lambda params: torch.optim.LBFGS(params, lr=0.1, max_iter=2),
    "sparse adam": lambda params: torch.optim.SparseAdam(params, lr=0.01),
    "tensor lr": lambda params: torch.optim.AdamW(params, lr=torch.tensor(0.01), foreach=False),
    "tensor betas": lambda params: torch.optim.AdamW(
        params, lr=torch.tensor(0.01), betas=(torch.tensor(0.9), torch.tensor(0.99)), foreach=False
    ),
    "tensors in groups": lambda params: _Plain(params, scales=[torch.ones(2)], table={"a": (torch.ones(1), None)}),
    "zero redundancy": _zero_redundancy,
    "late state": _LateState,
    "lists in state": _ListsInState,
    "global item": _GlobalItem,
    "shared state": _SharedState,
    "extra entry": _ExtraEntry,
    "counting steps": _CountingSteps,
}
ONE_GROUP = frozenset({"lbfgs"})
MATRICES_ONLY = frozenset({"muon"})
SPARSE = frozenset({"sparse adam"})
"""Their gradients are made sparse."""


def groups_of(named: list[tuple[str, torch.nn.Parameter]], grouping: str) -> Any:
    """Return the argument of an optimizer: parameters, pairs with names, or groups of either."""
    with_names = grouping.startswith("named")
    params: list[Any] = list(named) if with_names else [parameter for _, parameter in named]
    if grouping.endswith("two"):
        cut = (len(params) + 1) // 2
        groups = [{"params": params[:cut]}, {"params": params[cut:], "lr": 0.02}]
        return groups if len(params) > 1 else params  # torch wants names in all groups or none, not in an empty one
    if grouping == "empty last":
        return [{"params": params}, {"params": []}]
    return params


GROUPINGS = ("one", "two", "empty last", "named", "named two")


def make_optimizer(name: str, named: list[tuple[str, torch.nn.Parameter]], grouping: str) -> Optimizer:
    """Return the optimizer `name` over the named parameters; `grouping` is one of `GROUPINGS`."""
    if name in MATRICES_ONLY:
        named = _matrices(named)
    return OPTIMIZERS[name](groups_of(named, "one" if name in ONE_GROUP else grouping))
