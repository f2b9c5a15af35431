"""What each rank of the matrix does: every layout, every optimizer, from any layout into any other."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import layouts as given
import torch
import torch.distributed as dist
from carrier import bits

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
}


class Trial:
    """A model in a layout with its optimizers."""

    def __init__(self, layout: str, optimizer: str) -> None:
        torch.manual_seed(1)
        model = given.Model()
        model.block.up.bias.requires_grad_(optimizer != "groups")
        self.model = given.LAYOUTS[layout](model)
        self.optimizers = OPTIMIZERS[optimizer](self.model)
        self.batch = given.BATCHES.get(layout, int)(dist.get_rank())

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, **{f"optim{number}": item for number, item in enumerate(self.optimizers)}}

    def step(self, number: int) -> None:
        """One step, on a batch that depends on its number alone."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        inputs = torch.randn(4, given.SIZES[0], generator=torch.Generator().manual_seed(number * 10 + self.batch))
        self.model(inputs).square().mean().backward()
        for optimizer in self.optimizers:
            optimizer.step()

    def whole(self, *, buffers: bool) -> dict[str, Any]:
        """Everything that a checkpoint has of it; the buffers of the norm are each rank's own."""
        flat = collect(self.state)
        found = {
            key: bits(given.full(entry.tensor))
            for key, entry in flat.tensors.items()
            if buffers or "norm.run" not in key
        }
        return {**found, **{key: bits(value) for key, value in flat.values.items()}}


def _refusal(layout: str, optimizer: str) -> str:
    """What torch says to a training of that kind, "" if it trains."""
    try:
        Trial(layout, optimizer).step(1)
    except Exception as error:  # whatever an optimizer makes of a layout, it is not about checkpoints
        return f"torch: {type(error).__name__}"
    return ""


def matrix(directory: Path, made: list[str], loaded: list[str], optimizers: list[str]) -> dict[str, str]:
    """Save in each layout with each optimizer, and load into each; what was wrong, and what torch itself refuses."""
    given.start()
    told: dict[str, str] = {}
    for optimizer in optimizers:
        refused = {layout: error for layout in sorted({*made, *loaded}) if (error := _refusal(layout, optimizer))}
        told.update((f"{layout} {optimizer}", error) for layout, error in refused.items())
        for layout in (one for one in made if one not in refused):
            trial = Trial(layout, optimizer)
            trial.step(1)
            trial.step(2)
            with ckptstore.open_store(directory / f"{layout}-{optimizer}", durable=False) as store:
                store.save(2, trial.state)
                saved = trial.whole(buffers=False)
                if dist.get_rank() == 0:
                    (directory / f"{layout}-{optimizer}.saved").write_bytes(pickle.dumps(saved))
                trial.step(3)
                after = trial.whole(buffers=layout != "ddp")
                for other in (one for one in loaded if one not in refused):
                    name = f"{layout} -> {other} {optimizer}"
                    again = Trial(other, optimizer)
                    if other == "ddp":
                        again.step(9)  # DDP sums in another order once it has seen a backward pass
                    try:
                        store.load(again.state)
                    except ckptstore.CkptstoreError as error:
                        told[name] = f"{type(error).__name__}: {str(error)[:300]}"
                        continue
                    found = again.whole(buffers=False)
                    if found != saved:
                        told[name] = f"loaded: {[key for key in saved if found.get(key) != saved[key]]}"
                    elif other == layout:
                        again.step(3)
                        end = again.whole(buffers=layout != "ddp")
                        if end != after:
                            told[name] = f"after a step: {[key for key in after if end.get(key) != after[key]]}"
    given.finish()
    return told
