"""Everything that a run needs to go on as if it had never ended, found from its objects."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from ckptstore.errors import InvalidState
from ckptstore.state.live.accelerated import check_has_position, is_of_accelerate, is_prepared_loader, prepared_by
from ckptstore.state.live.flatten import Kind, is_loader, kind_of, per_rank, takes_all_ranks, units_of
from ckptstore.state.live.loader_state import LoaderState, random_numbers, set_random_numbers

logger = logging.getLogger(__name__)

RANDOM_KEY = "rng"
"""The key of the random numbers in such a state."""


def state_of(objects: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of these objects; see `ckptstore.all_state`."""
    state: dict[str, Any] = {}
    for accelerator in (item for item in objects if is_of_accelerate(item, "Accelerator")):
        prepared = dict(prepared_by(accelerator))
        if twice := prepared.keys() & named.keys():
            raise InvalidState(f"{min(twice)!r} is what the Accelerator has, too", hint="Give it another name")
        named = {**prepared, **named}
        has = {id(item) for item in (accelerator, *prepared.values())}  # of a model in DDP, the model
        objects = [item for item in objects if not {id(item), id(getattr(item, "module", item))} & has]
    for item in _with_optimizers([*objects, *named.values()], objects):
        name = _name_of(item)
        if name in state or name in named:
            raise InvalidState(
                f"two objects would have the key {name!r} in the state",
                hint=f"Give each a name: all_state(..., {name}_a=..., {name}_b=...)",
            )
        state[name] = _storable(name, item)
    state |= {name: _storable(name, item) for name, item in named.items()}
    if RANDOM_KEY in state:
        raise InvalidState(f"{RANDOM_KEY!r} is the key of the random numbers", hint="Give the object another name")
    state[RANDOM_KEY] = RandomNumbers(unit.item for unit in units_of(state) if unit.kind is Kind.MODULE)
    return state


class RandomNumbers:
    """The random numbers of this process: those of torch, numpy and Python, and of the accelerators in use.

    In use are those that have a tensor of `modules` when the state is taken, and the current one if torch has
    initialised it.
    """

    def __init__(self, modules: Iterable[torch.nn.Module] = ()) -> None:
        self._watched = list(modules)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all generators. Draws no number and initialises no accelerator."""
        return {
            **random_numbers(),
            "accelerators": {
                str(device): torch.get_device_module(device).get_rng_state(*_number_of(device))
                for device in self._accelerators()
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set all generators. A warning names the accelerators that only the checkpoint or only this process has."""
        set_random_numbers(state)
        saved = state["accelerators"]
        present = {str(device): device for device in self._accelerators()}
        for name in saved.keys() & present.keys():
            torch.get_device_module(present[name]).set_rng_state(saved[name], *_number_of(present[name]))
        lost, new = saved.keys() - present.keys(), present.keys() - saved.keys()
        if lost or new:
            changes = [f"{name} is not in use here" for name in sorted(lost)] + [
                f"{name} is new" for name in sorted(new)
            ]
            logger.warning("the run cannot repeat the saved one's random numbers: %s", ", ".join(changes))

    def _accelerators(self) -> list[torch.device]:
        kind = torch.accelerator.current_accelerator(check_available=True)
        if kind is None:
            return []
        found = {
            tensor.device
            for module in self._watched
            for tensor in (*module.parameters(), *module.buffers())
            if tensor.device.type == kind.type
        }
        if getattr(torch.get_device_module(kind), "is_initialized", lambda: False)():
            found.add(torch.device(kind.type, torch.accelerator.current_device_index()))
        return sorted(found, key=str)


def _with_optimizers(all_objects: list[Any], unnamed: Iterable[Any]) -> Iterator[Any]:
    """Yield the objects without a name, and the optimizers of schedulers that nobody has given."""
    known = {id(item) for item in all_objects}
    known |= {id(item.optimizer) for item in all_objects if is_of_accelerate(item, "AcceleratedOptimizer")}
    yield from unnamed
    for item in all_objects:
        found = [item.optimizer] if isinstance(item, LRScheduler) else []
        found = item.optimizers if is_of_accelerate(item, "AcceleratedScheduler") else found
        for optimizer in found:
            if id(optimizer) not in known:
                known.add(id(optimizer))
                yield optimizer


def _name_of(item: Any) -> str:
    kind = kind_of(item)
    if kind in (Kind.MODULE, Kind.OPTIMIZER, Kind.SCHEDULER):
        return {Kind.MODULE: "model", Kind.OPTIMIZER: "optimizer", Kind.SCHEDULER: "scheduler"}[kind]
    if is_of_accelerate(item, "AcceleratedScheduler"):
        return "scheduler"
    if isinstance(item, torch.Generator):
        return "generator"
    if is_loader(item):
        return "loader"
    if isinstance(item, torch.amp.GradScaler):
        return "scaler"
    raise InvalidState(
        f"all_state does not know what a {type(item).__name__} is called in a state",
        hint="Give it a name: all_state(..., name=object)",
    )


def _storable(name: str, item: Any) -> Any:
    """Return what stands for an object in a state."""
    if isinstance(item, torch.Generator):
        return _GeneratorState(item)
    if is_prepared_loader(item):
        check_has_position(name, item)
    if not is_loader(item) or takes_all_ranks(item):
        return item
    if kind_of(item) is not Kind.STATEFUL:
        raise InvalidState(
            f"{name} is a {type(item).__name__}, which cannot say where it is in its data: it has no state_dict",
            hint="Use torchdata's StatefulDataLoader; or leave it out, save at the ends of epochs, and give all_state "
            "the generator that shuffles, if it has one",
        )
    return per_rank(LoaderState(item))


class _GeneratorState:
    """A generator of torch as an object with a state."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def state_dict(self) -> dict[str, Any]:
        return {"state": self._generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._generator.set_state(state["state"])


def _number_of(device: torch.device) -> tuple[int, ...]:
    """Return the number of a device as arguments; none for the one that is meant without: some backends (MPS) take
    none."""
    return () if device.index == torch.accelerator.current_device_index() else (device.index,)
