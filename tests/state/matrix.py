"""What each rank of the matrix does: every layout, every optimizer, from any layout into any other.

Two steps are trained on batches of each rank's own, and saved. The third is on one batch for all ranks, so that every
layout computes the same and can be compared with the run that was not interrupted. The fourth has batches of their own
again, for the layout that goes on with what it saved itself.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import layouts as given
import torch
import torch.distributed as dist
from carrier import bits, training, unchanged_by

import ckptstore
from ckptstore.state.live.apply import collect


def _groups(model: torch.nn.Module) -> list[torch.optim.Optimizer]:
    """Two parameter groups with settings of their own, and a frozen parameter."""
    named = dict(model.named_parameters())
    frozen = next(item for item in named.values() if not item.requires_grad)
    norms = [item for name, item in named.items() if "norm" in name]
    others = [item for item in named.values() if all(item is not norm for norm in [*norms, frozen])]
    return [torch.optim.AdamW([{"params": norms, "weight_decay": 0.0}, {"params": [*others, frozen], "lr": 0.02}])]


def _several(model: torch.nn.Module) -> list[torch.optim.Optimizer]:
    """Muon for matrices, and another optimizer for the rest."""
    matrices = [item for item in model.parameters() if item.dim() == 2]
    rest = [item for item in model.parameters() if item.dim() != 2]
    return [torch.optim.Muon(matrices, lr=0.01), torch.optim.SGD(rest, lr=0.01)]


def _quantised(name: str) -> Any:
    """One of torchao's, without compiling its steps."""

    def make(model: torch.nn.Module) -> list[torch.optim.Optimizer]:
        import torchao.optim

        torch.compiler.set_stance("force_eager")
        return [getattr(torchao.optim, name)(model.parameters(), lr=0.01)]

    return make


def _one(make: Callable[..., torch.optim.Optimizer], **settings: Any) -> Any:
    return lambda model: [make(model.parameters(), **settings)]


OPTIMIZERS: dict[str, Callable[[torch.nn.Module], list[torch.optim.Optimizer]]] = {
    "adamw": _one(torch.optim.AdamW, lr=0.01),
    "momentum": _one(torch.optim.SGD, lr=0.01, momentum=0.9, nesterov=True),
    "adagrad": _one(torch.optim.Adagrad, lr=0.01),
    "adafactor": _one(torch.optim.Adafactor, lr=0.01),
    "rprop": _one(torch.optim.Rprop, lr=0.01),
    "several": _several,
    "groups": _groups,
    "adamw-8bit": _quantised("AdamW8bit"),
    "adamw-4bit": _quantised("AdamW4bit"),
    "adamw-fp8": _quantised("AdamWFp8"),
}
QUANTISED_SIZES = (64, 128, 128)
"""What torchao quantises has at least 4,096 elements on a rank."""


NOISE = ("model.block.up.bias", "optim0.state.model.block.up.bias")
"""What the norm takes away again: the gradient is zero but for rounding, and an optimizer makes steps of it."""


class Trial:
    """A model in a layout with its optimizers. "alone" is one process without a group."""

    def __init__(self, layout: str, optimizer: str) -> None:
        torch.manual_seed(1)
        self.sizes = QUANTISED_SIZES if "bit" in optimizer or "fp8" in optimizer else given.SIZES
        model = given.Model(self.sizes)
        model.block.up.bias.requires_grad_(optimizer != "groups")
        self.model = model if layout == "alone" else given.LAYOUTS[layout](model)
        self.optimizers = OPTIMIZERS[optimizer](self.model)
        self.batch = given.BATCHES.get(layout, int)(_rank())

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, **{f"optim{number}": item for number, item in enumerate(self.optimizers)}}

    def step(self, number: int, *, same_batch: bool = False) -> None:
        """One step, on a batch that depends on its number and, if wished, on nothing else."""
        self.backward(number, same_batch=same_batch)
        for optimizer in self.optimizers:
            optimizer.step()

    def backward(self, number: int, *, same_batch: bool = False) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        seed = number * 10 + (9 if same_batch else self.batch)
        inputs = torch.randn(4, self.sizes[0], generator=torch.Generator().manual_seed(seed))
        model = getattr(self.model, "_orig_mod", self.model)  # as compiled with the eager backend, but quickly
        model(inputs).square().mean().backward()

    def whole(self, *, buffers: bool = False) -> dict[str, Any]:
        """Everything that a checkpoint has of it; the buffers of the norm are each rank's own."""
        flat = collect(self.state)
        found = {
            key: given.full(entry.tensor) for key, entry in flat.tensors.items() if buffers or "norm.run" not in key
        }
        found |= {key: found[first] for key, first in flat.aliases.items()}
        return {**found, **{key: bits(value) for key, value in flat.values.items()}}


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


@functools.cache
def _refusal(layout: str, optimizer: str) -> str:
    """What torch says to a training of that kind, "" if it trains."""
    try:
        Trial(layout, optimizer).step(1)
    except Exception as error:  # whatever an optimizer makes of a layout, it is not about checkpoints
        return f"torch: {type(error).__name__}"
    return ""


def save_all(directory: Path, made: Sequence[str], optimizers: Sequence[str]) -> dict[str, str]:
    """Save in each layout with each optimizer, and go on; what torch refuses, or a save."""
    told: dict[str, str] = {}
    for optimizer in optimizers:
        for layout in made:
            if error := _refusal(layout, optimizer):
                told[f"{layout} {optimizer}"] = error
                continue
            trial = Trial(layout, optimizer)
            trial.step(1)
            trial.step(2)
            try:
                with ckptstore.open_store(directory / f"{layout}-{optimizer}", durable=False) as store:
                    looks = [look for one in trial.optimizers for look in training(trial.model, one)]
                    unchanged_by(lambda store=store, trial=trial: store.save(2, trial.state), *looks)
            except ckptstore.CkptstoreError as error:
                told[f"{layout} {optimizer}"] = f"{type(error).__name__}: {str(error)[:300]}"
                continue
            saved = trial.whole()
            trial.step(3, same_batch=True)
            after = trial.whole()
            trial.step(4)
            seen = saved, after, trial.whole(buffers=layout != "ddp")
            torch.save(seen, directory / f"{layout}-{optimizer}.{_rank()}")
    return told


def load_all(
    directory: Path, sources: Sequence[str], loaded: Sequence[str], optimizers: Sequence[str]
) -> dict[str, Any]:
    """Load what each layout saved into each, and go on. What was refused or wrong, and else how far a step was off."""
    told: dict[str, Any] = {}
    for optimizer in optimizers:
        for source in (one for one in sources if (directory / f"{one}-{optimizer}.0").exists()):
            own = directory / f"{source}-{optimizer}.{_rank()}"
            seen = torch.load(own if own.exists() else own.with_suffix(".0"))
            with ckptstore.open_store(directory / f"{source}-{optimizer}") as store:
                for layout in (one for one in loaded if not _refusal(one, optimizer)):
                    name = f"{source} -> {layout} {optimizer}"
                    try:
                        told[name] = _go_on(store, source, layout, optimizer, *seen)
                    except ckptstore.CkptstoreError as error:
                        told[name] = f"{type(error).__name__}: {str(error)[:300]}"
    return told


def _go_on(
    store: ckptstore.CheckpointStore, source: str, layout: str, optimizer: str, saved: Any, after: Any, end: Any
) -> str | float:
    """Load and train on; what was wrong, or how far the next step was off."""
    again = Trial(layout, optimizer)
    for group in (group for item in again.optimizers for group in item.param_groups):
        group["lr"] *= 3  # what is saved counts
    if layout == "ddp":
        again.step(9)  # DDP sums in another order once it has seen a backward pass
    again.backward(9)
    gradients = [parameter.grad for parameter in again.model.parameters()]
    store.load(again.state, per_rank="first" if "alone" in (source, layout) else "error")
    if any(item.grad is not gradient for item, gradient in zip(again.model.parameters(), gradients, strict=True)):
        return "loaded: other gradients"
    if wrong := _different(again.whole(), saved):
        return f"loaded: {wrong}"
    again.step(3, same_batch=True)
    found = again.whole()
    off = max(_distance(found[key], after[key]) for key in after if not key.startswith(NOISE))
    if not off and _different(found, after):
        off = sys.float_info.min
    if layout == source:
        again.step(4)
        if wrong := _different(again.whole(buffers=layout != "ddp"), end):
            return f"after two steps: {wrong}"
    return off


def _different(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    return sorted(key for key in found.keys() | expected.keys() if bits(found.get(key)) != bits(expected.get(key)))


def _distance(found: Any, expected: Any) -> float:
    """How far a tensor is off, measured by its largest number; infinite if it may not be off at all."""
    if bits(found) == bits(expected):
        return 0.0
    if not isinstance(found, torch.Tensor) or not found.is_floating_point() or found.shape != expected.shape:
        return float("inf")
    off = (found.double() - expected.double()).abs().max() / expected.double().abs().max()
    return float(off)


def matrix(
    directory: Path, made: Sequence[str], loaded: Sequence[str], optimizers: Sequence[str], sources: Sequence[str] = ()
) -> dict[str, Any]:
    """Save in each layout with each optimizer, and load those and what is there already into each."""
    given.start()
    told = save_all(directory, made, optimizers)
    dist.barrier()
    told |= load_all(directory, [*made, *sources], loaded, optimizers)
    given.finish()
    return told
