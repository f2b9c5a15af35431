"""Objects beside modules and optimizers: schedulers of torch, and objects that write to others when they are loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer, lr_scheduler

from ckptstore.testing.oracle import WritesAtLoad


class _OwnScheduler(WritesAtLoad):
    """Writes the settings that its constructor got into all groups, in each step and at a load, as Megatron's does."""

    def __init__(self, optimizers: Sequence[Optimizer], random: Random) -> None:
        self._optimizers = optimizers
        self._rate, self._decay = random.uniform(0.01, 0.1), random.uniform(0.0, 0.1)
        self._count = 0
        self._write()

    def step(self) -> None:
        self._count += 1
        self._write()

    def _write(self) -> None:
        for group in (group for optimizer in self._optimizers for group in optimizer.param_groups):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(self._rate / (1 + self._count))
            else:
                group["lr"] = self._rate / (1 + self._count)
            for name in {"weight_decay", "momentum", "alpha"} & group.keys():
                group[name] = self._decay
            if isinstance(group.get("betas"), tuple):
                group["betas"] = (type(group["betas"][0])(0.5 + self._decay), *group["betas"][1:])

    def state_dict(self) -> dict[str, Any]:
        return {"count": self._count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._count = state["count"]
        self._write()


class _Averaged(WritesAtLoad):
    """Has averages of weights, which it puts into the module when it is loaded: into its memory, or new memory."""

    def __init__(self, modules: Mapping[str, nn.Module], tensors: Callable[[], list[Any]], *, swaps: bool) -> None:
        self._averaged, self._tensors, self._swaps = modules, tensors, swaps
        self._shadow = [parameter.detach() * 0.5 for parameter in self._parameters()]

    def _parameters(self) -> list[nn.Parameter]:
        every = [parameter for module in self._averaged.values() for parameter in module.parameters()]
        return [each for each in every if type(each) is nn.Parameter]  # neither lazy nor distributed

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self._shadow}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._shadow = list(state["shadow"])
        for parameter, average in zip(self._parameters(), self._shadow, strict=False):
            if parameter.shape != average.shape:  # a layer is another one now
                continue
            if self._swaps:
                parameter.data = average.to(parameter.device, copy=True)
            else:
                parameter.data.copy_(average)
        for tensor in self._tensors():
            zero(tensor)


def zero(tensor: Any) -> None:
    """Write zeros into the memory of a dense tensor, whatever its strides."""
    is_dense = isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided and not tensor.is_nested
    if not is_dense or tensor.is_meta or isinstance(tensor, nn.UninitializedParameter | nn.UninitializedBuffer):
        return
    local = getattr(tensor, "_local_tensor", tensor)
    torch.empty(0, dtype=torch.uint8, device=local.device).set_(local.untyped_storage()).zero_()


def _has_momentum(optimizer: Optimizer) -> bool:
    return "momentum" in optimizer.defaults or "betas" in optimizer.defaults


def _sequence(optimizer: Optimizer) -> Any:
    parts: list[Any] = [
        lr_scheduler.LinearLR(optimizer, 0.5, total_iters=3),
        lr_scheduler.ExponentialLR(optimizer, 0.9),
    ]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[1])


def _chain(optimizer: Optimizer) -> Any:
    parts: list[Any] = [lr_scheduler.ConstantLR(optimizer, 0.5), lr_scheduler.StepLR(optimizer, 2)]
    return lr_scheduler.ChainedScheduler(parts, optimizer)


SCHEDULERS: Mapping[str, Callable[[Optimizer], Any]] = {
    "scheduler": lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.9),
    "plateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(
        optimizer, 0.1, total_steps=100, cycle_momentum=_has_momentum(optimizer)
    ),
    "cyclic": lambda optimizer: lr_scheduler.CyclicLR(
        optimizer, 0.01, 0.1, step_size_up=3, cycle_momentum=_has_momentum(optimizer)
    ),
    "step rate": lambda optimizer: lr_scheduler.StepLR(optimizer, 2),
    "multi step": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [1, 3]),
    "constant": lambda optimizer: lr_scheduler.ConstantLR(optimizer, 0.5),
    "linear rate": lambda optimizer: lr_scheduler.LinearLR(optimizer, 0.5),
    "polynomial": lambda optimizer: lr_scheduler.PolynomialLR(optimizer, 9),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 9),
    "warm restarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 2),
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "multiplicative": lambda optimizer: lr_scheduler.MultiplicativeLR(optimizer, lambda step: 0.9),
    "swa": lambda optimizer: torch.optim.swa_utils.SWALR(optimizer, 0.03, anneal_epochs=3),
    "sequence": _sequence,
    "chain": _chain,
}
WRITERS: Mapping[str, Callable[..., WritesAtLoad]] = {
    "own scheduler": lambda program: _OwnScheduler(program.all_optimizers(), program.random),
    "averages": lambda program: _Averaged(program.modules, program.tensors_outside, swaps=False),
    "averages swapped": lambda program: _Averaged(program.modules, program.tensors_outside, swaps=True),
}
"""Objects that write to others when they are loaded, from the program."""
