"""The live objects of one case, as a training program makes them, and the events of that program."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from random import Random
from typing import Any

import torch
from torch import nn

from ckptstore.state import per_rank
from ckptstore.testing.oracle import WritesAtLoad, plain_name
from kit.states.module_makers import MODULES, ROWS, UNWRAPPED, WIDTH, WRAPPERS
from kit.states.object_makers import SCHEDULERS, WRITERS, zero
from kit.states.optimizer_makers import SPARSE, make_optimizer
from kit.states.state_case import StateCase
from kit.states.tensor_makers import TARGETS, TENSORS
from kit.states.upgraded_makers import UPGRADED
from kit.states.value_makers import VALUES


class Program:
    """The objects of one process. The same case, flags and salt make the same program bit by bit.

    `state` is saved and loaded. `modules` are the modules in it without their wrappers,
    `random` is what its numbers come from.
    """

    def __init__(self, case: StateCase, flags: frozenset[str], *, salt: int) -> None:
        """Build the program. `salt` 0 is the program that saves; with another one every number differs."""
        torch.default_generator.manual_seed(2 * case.seed + salt)
        self.random = Random(2 * case.seed + salt)
        self._case = case
        self._count = 0
        self.state: dict[str, Any] = {}
        self.modules: dict[str, nn.Module] = {}
        for key, name in zip("ab", case.modules, strict=False):
            later = UNWRAPPED if "unwrapped" in flags else UPGRADED if "upgraded" in flags else {}
            body = later.get(name, MODULES[name])()
            if "frozen" in flags:
                body.requires_grad_(False)
            self.modules[key] = body if case.bare else _network(body, flags)
        if {"a", "b"} <= self.modules.keys() and "share" in flags and not case.bare:
            self.modules["b"].left = self.modules["a"].left
        wrapper = "" if "unwrapped" in flags else case.wrapper
        for key, module in self.modules.items():
            wraps = wrapper != "ddp" or (key == "a" and _can_be_ddp(module))
            self.state[key] = WRAPPERS[wrapper](module) if wraps else module
        self.optimizer: torch.optim.Optimizer | None = None
        self.scheduler: Any = None
        self.writers: dict[str, WritesAtLoad] = {}
        if case.optimizer and self._named("over one" in flags):
            self.optimizer = make_optimizer(case.optimizer, self._named("over one" in flags), case.grouping)
            self.state["optimizer"] = self.optimizer
        if case.num_ranks > 1:
            own = salt + 2 * (1 + torch.distributed.get_rank())
            torch.default_generator.manual_seed(2 * case.seed + own)
            self.random = Random(2 * case.seed + own)
        for name in case.extras:
            self._add_extra(name)
        if case.tensors:
            self.state["raw"] = {f"{at} {name}": TENSORS[name]() for at, name in enumerate(case.tensors)}
        if case.values:
            self.state["values"] = {f"{at} {name}": VALUES[name](self.random) for at, name in enumerate(case.values)}

    def _named(self, over_one: bool) -> list[tuple[str, nn.Parameter]]:
        modules = list(self.modules.items())[: 1 if over_one else None]
        found = {
            id(parameter): (f"{key}.{name}", parameter)
            for key, module in reversed(modules)
            for name, parameter in module.named_parameters()
        }
        order = {id(parameter): None for _, module in modules for parameter in module.parameters()}
        return [found[each] for each in order]

    def _add_extra(self, name: str) -> None:
        if name in SCHEDULERS:
            if self.optimizer is None or self.scheduler is not None or not self.optimizer.param_groups:
                return
            self.scheduler = self.state["scheduler"] = SCHEDULERS[name](self.optimizer)
        elif name in WRITERS:
            if not self._case.wrapper.startswith("fsdp1"):  # whose weights no load can put back
                self.writers[name] = self.state[name] = WRITERS[name](self)
        elif name == "second optimizer":
            self.state["other"] = nn.Linear(2, 2)
            groups: list[Any] = [
                {"params": [each], "lr": 0.01 * at} for at, each in enumerate(self.state["other"].parameters())
            ]
            self.state["second"] = torch.optim.SGD(groups, momentum=0.9, weight_decay=self.random.random())
        elif name == "scaler":
            self.state["scaler"] = torch.amp.GradScaler("cpu", init_scale=2.0 ** self.random.randint(1, 9))
        elif name == "rng":
            self.state["rng"] = torch.get_rng_state()
        else:
            loader = _Loader(self.random.randint(0, 99))
            self.state[name] = per_rank(loader) if name == "per rank loader" else loader

    def use_targets(self, saved: Program) -> None:
        """Replace the raw tensors by the targets of the case."""
        if "raw" not in self.state:
            return
        for key, item in saved.state["raw"].items():
            self.state["raw"][key] = _targets(item, self._case.target)

    def do(self, event: str) -> None:
        """Perform one of `EVENTS`, `LATER` or `MEANWHILE`."""
        if event:
            _EVENTS[event](self)

    def _lower_lr(self) -> None:
        for group in [] if self.optimizer is None else self.optimizer.param_groups:
            group["lr"] = group["lr"] * 0.5

    def _require_grad(self, required: bool) -> None:
        for parameter in list(self.modules["a"].parameters())[:2] if self.modules else ():
            if parameter.is_floating_point() and not isinstance(parameter, nn.UninitializedParameter):
                parameter.requires_grad_(required)

    def _drop_optimizer_state(self) -> None:
        if self.optimizer is not None:
            self.optimizer.state.clear()

    def _swap_storages(self) -> None:
        for module in self.modules.values():
            for parameter in module.parameters():
                if type(parameter) is nn.Parameter:
                    parameter.data = parameter.data.clone()

    def _step(self, *, is_zero: bool = False) -> None:
        if not self.modules:
            return
        self._count += 1
        torch.default_generator.manual_seed(self._count)  # torch.manual_seed takes a millisecond
        data = torch.randn(ROWS, WIDTH, generator=torch.Generator("cpu").manual_seed(self._count), device="cpu")
        data = data.to(self._case.device or "cpu")

        def closure() -> torch.Tensor:
            wrapped = [self.state[key] for key in self.modules]
            for module in wrapped:
                module.zero_grad()
            losses = [module(data.clone().requires_grad_()).square().mean() for module in wrapped]
            loss = torch.stack(losses).sum()
            loss.backward()  # type: ignore[no-untyped-call]
            for parameter in self._trained():
                if parameter.grad is not None and is_zero:
                    parameter.grad.zero_()
                if parameter.grad is not None and self._case.optimizer in SPARSE:
                    parameter.grad = parameter.grad.to_sparse()
            return loss.detach()

        if self.optimizer is None:
            closure()
            return
        loss = self.optimizer.step(closure)  # type: ignore[arg-type]
        if self.scheduler is not None:
            is_plateau = isinstance(self.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
            self.scheduler.step(float(loss or 0)) if is_plateau else self.scheduler.step()
        if "own scheduler" in self.writers:
            self.state["own scheduler"].step()

    def _trained(self) -> list[torch.Tensor]:
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        return [parameter for group in groups for parameter in group["params"]]

    def all_optimizers(self) -> list[torch.optim.Optimizer]:
        """Return the optimizers of the state."""
        return [item for item in self.state.values() if isinstance(item, torch.optim.Optimizer)]

    def tensors_outside(self) -> list[torch.Tensor]:
        """Return the tensors of the state that no module has."""
        states = [] if self.optimizer is None else list(self.optimizer.state.values())
        return _tensors_in([self.state.get("raw"), states])

    def all_tensors(self) -> list[torch.Tensor]:
        """Return the tensors of the state, including all that share memory."""
        modules = [module.state_dict() for module in self.modules.values()]
        return [*_tensors_in([self.state.get("values"), modules]), *self.tensors_outside()]

    def _overwrite_one(self) -> None:
        for tensor in self.all_tensors()[:1]:
            zero(tensor)

    def _overwrite(self) -> None:
        """Change everything in place that can change, to expose a copy that is not one."""
        for tensor in self.all_tensors():
            zero(tensor)
        for value in self.state.get("values", {}).values():
            if isinstance(value, list | dict | set | bytearray) and not _tensors_in(value):
                value.clear()  # a load wants the tensors that the state has

    def optimizer_names(self) -> list[list[str]]:
        """Return the names of the optimizer's parameters, by group."""
        names = {id(parameter): plain_name(name) for name, parameter in self._named(over_one=False)}
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        return [[names[id(parameter)] for parameter in group["params"]] for group in groups]


_EVENTS: Mapping[str, Callable[[Program], None]] = {
    "step": lambda program: program._step(),
    "zero step": lambda program: program._step(is_zero=True),
    "lower lr": Program._lower_lr,
    "freeze": lambda program: program._require_grad(False),
    "thaw": lambda program: program._require_grad(True),
    "drop optimizer state": Program._drop_optimizer_state,
    "swap storages": Program._swap_storages,
    "overwrite": Program._overwrite,
    "overwrite one tensor": Program._overwrite_one,
}


class _Loader:
    """An object with a position, and a permutation that its state has as a tensor."""

    def __init__(self, position: int) -> None:
        self.position = position
        self.order = torch.randperm(5)

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "order": self.order, "left": (1, [self.position])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position, self.order = state["position"], state["order"]


def _network(body: nn.Module, flags: frozenset[str]) -> nn.Module:
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    if "first layer" in flags:
        layers["pre"] = nn.Linear(WIDTH, WIDTH)
    layers["trunk" if "renamed body" in flags else "body"] = body
    layers["left"], layers["right"] = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    if "no head" not in flags:
        layers["top" if "renamed head" in flags else "head"] = nn.Linear(WIDTH, 3)
    if "last layer" in flags:
        layers["post"] = nn.Softplus() if "no head" in flags else nn.Linear(3, 3)
    network = nn.Sequential(layers)
    if "tie" in flags:
        network.right.weight = network.left.weight  # type: ignore[union-attr]
    return network


def _can_be_ddp(module: nn.Module) -> bool:
    parameters = list(module.parameters())
    lazy = any(isinstance(parameter, nn.UninitializedParameter) for parameter in parameters)
    return not lazy and any(parameter.requires_grad for parameter in parameters)


def _targets(item: Any, target: str) -> Any:
    if isinstance(item, dict):
        made = {key: _targets(each, "zeros" if target == "one memory" else target) for key, each in item.items()}
        if target == "one memory":
            shapes = {(tuple(each.shape), each.dtype): each for each in made.values()}
            made = {key: shapes[tuple(each.shape), each.dtype] for key, each in made.items()}
        return made
    is_dense = item.layout is torch.strided and not item.is_quantized and not item.is_nested
    if not is_dense or item.is_meta or target == "one memory" or (target == "conj" and not item.is_complex()):
        target = "zeros"
    return TARGETS[target](item)


def _tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [tensor for each in inner for tensor in _tensors_in(each)]
