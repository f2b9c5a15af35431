"""What an optimizer contributes to a state: its state and hyperparameters by the names of the parameters.

Everything goes through torch.distributed.checkpoint.state_dict with flattened keys, which are the same for every
parallel layout: `state.<parameter>.exp_avg`, `param_groups.<parameter>.lr`. `Optimizer.state_dict` alone would number
the parameters, and a new optimizer would load nothing of it without a word. Left to itself torch's helper creates the
state of an optimizer that has not stepped, and with it changes the run; here such an optimizer is read as it is.

The settings of a parameter group without parameters are not stored: there is no name to store them under.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel

from ckptstore.errors import InvalidState
from ckptstore.runtime.torch_private import canonical_names, is_tensor_parallel_fsdp1, is_wrapper
from ckptstore.state.live.flatten import FlatState, Path, TensorEntry, join_path
from ckptstore.state.live.modules import Sameness, blaming, quiet_torch

STATE, GROUPS = "state", "param_groups"

OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True, strict=False)


class _KeptEmpty(defaultdict[Any, Any]):
    """An empty state that torch's helper takes for one that exists already, so that it does not make one up."""

    def __bool__(self) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class Scope:
    """What names the parameters of one optimizer.

    `root` is the module that owns them all: one of the state, or a holder of several, whose children are then called
    "0", "1", ... and are stored under `prefixes`. `names` has, by the id of a parameter, its canonical names in the
    checkpoint: several for FSDP1's flat parameters.
    """

    root: torch.nn.Module
    prefixes: tuple[str, ...]
    names: dict[int, tuple[str, ...]]

    def public(self, name: str) -> str:
        """The name in the checkpoint of what `root` calls `name`."""
        if not self.prefixes:
            return name
        child, _, rest = name.partition(".")
        return f"{self.prefixes[int(child)]}.{rest}"

    def private(self, name: str) -> str:
        """The opposite of `public`."""
        for child, prefix in enumerate(self.prefixes):
            if name.startswith(f"{prefix}."):
                return f"{child}.{name.removeprefix(f'{prefix}.')}"
        return name

    def of(self, parameter: torch.Tensor) -> tuple[str, ...]:
        """The names of a parameter in the checkpoint."""
        return self.names[id(parameter)]


def scope_of(key: str, optimizer: torch.optim.Optimizer, modules: Sequence[tuple[str, torch.nn.Module]]) -> Scope:
    """Find the modules of the state that own an optimizer's parameters, by identity.

    The first module that owns them all, else as few as it takes in the order of the state; then the keys are prefixed
    with those of the modules. Raises InvalidState, with group and index, for a parameter that none owns.
    """
    wanted = {id(parameter): parameter for group in optimizer.param_groups for parameter in group["params"]}
    owned = [(name, module, {id(parameter) for parameter in module.parameters()}) for name, module in modules]
    for _, module, ids in owned:
        if wanted.keys() <= ids:
            return Scope(module, (), _names(module, wanted.keys()))
    missing, chosen = set(wanted), []
    for name, module, ids in owned:
        if missing & ids:
            chosen.append((name, module))
            missing -= ids
    if missing:
        raise _not_owned(key, optimizer, missing, len(modules))
    root = torch.nn.Module()
    for index, (_, module) in enumerate(chosen):
        root.add_module(str(index), module)
    joint = Scope(root, tuple(name for name, _ in chosen), {})
    named = {item: tuple(map(joint.public, names)) for item, names in _names(root, wanted.keys()).items()}
    return Scope(root, joint.prefixes, named)


def read_optimizer(key: str, optimizer: torch.optim.Optimizer, scope: Scope) -> dict[str, Any]:
    """The flat contents of an optimizer, under the names of the checkpoint. Collective under FSDP1.

    Changes nothing. The tensors are the live ones, except under FSDP1. Raises InvalidState when torch cannot give them,
    or gives others: of FSDP1 over tensor parallelism it gives every tensor parallel rank the state of the first.
    """
    if any(map(is_tensor_parallel_fsdp1, scope.root.modules())):
        raise InvalidState(
            f"the optimizer at {key!r} is of parameters under FSDP1 and tensor parallelism: torch gives the state of "
            f"the first tensor parallel rank for all of them",
            hint="Use FSDP2 (fully_shard) with tensor parallelism; the module alone can be saved",
        )
    _refuse_wrapped_under_fsdp1(key, optimizer, scope.root)
    with as_it_is(optimizer), quiet_torch(), blaming(f"the optimizer at {key!r}"):
        if not optimizer.param_groups:
            return {}
        flat = get_optimizer_state_dict(scope.root, optimizer, options=OPTIONS)
    return {rename(name, scope.public): item for name, item in flat.items()}


def _refuse_wrapped_under_fsdp1(key: str, optimizer: torch.optim.Optimizer, root: torch.nn.Module) -> None:
    """Raise InvalidState where torch raises on the ranks that have wrapped tensors, and the others wait for them for
    minutes: parts below a size are not wrapped. All ranks raise alike. Collective under FSDP1."""
    modules = [module for module in root.modules() if isinstance(module, FullyShardedDataParallel)]
    groups = {id(module.process_group): module.process_group for module in modules}
    states = optimizer.state.values() if groups else ()
    kinds = {type(item).__name__ for state in states for item in state.values() if is_wrapper(item)}
    for group in groups.values():
        found: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(found, min(kinds, default=""), group=group)
        kinds.update(filter(None, found))
    if kinds:
        raise InvalidState(
            f"the optimizer at {key!r} has state in tensors that wrap others ({min(kinds)}), under FSDP1, which cannot "
            f"put the parts of several ranks together",
            hint="Use FSDP2 (fully_shard), or an optimizer with plain tensors; the module alone can be saved",
        )


def collect_optimizer(
    flat: FlatState, path: Path, optimizer: torch.optim.Optimizer, scope: Scope, same: Sameness
) -> None:
    """Take an optimizer into a flat state. The state of a parameter that DDP keeps equal is equal itself."""
    equal: set[str] = set()
    if not _is_partial(optimizer):
        equal = {name for item in parameters_of(optimizer) if id(item) in same.parameters for name in scope.of(item)}
    for name, item in read_optimizer(join_path(path), optimizer, scope).items():
        if isinstance(item, torch.Tensor):
            split = split_name(name, equal)
            flat.add_tensor((*path, name), TensorEntry(item, split is not None and split[0] == STATE))
        else:
            flat.add_value((*path, name), item)


def split_name(flat_name: str, parameters: Collection[str]) -> tuple[str, str, str] | None:
    """Section, parameter and item of a flat name, None when it is not that of one of the parameters."""
    section, _, rest = flat_name.partition(".")
    parameter, item = rest, ""
    while parameter and parameter not in parameters:
        parameter, _, last = parameter.rpartition(".")
        item = f"{last}.{item}" if item else last
    return (section, parameter, item) if parameter and section in (STATE, GROUPS) else None


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """All parameters of an optimizer, in order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def rename(flat_name: str, new: Callable[[str], str]) -> str:
    """Apply a renaming to what follows "state." or "param_groups."."""
    section, _, rest = flat_name.partition(".")
    return f"{section}.{new(rest)}"


@contextmanager
def as_it_is(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Let torch's helpers see an optimizer without adding state to it, and without its groups that have no parameters.

    What the helpers set inside stays set.
    """
    groups, state = optimizer.param_groups, optimizer.state
    empty = None if state else _KeptEmpty(dict)
    optimizer.param_groups = [group for group in groups if group["params"]]
    if empty is not None:
        optimizer.state = empty
    try:
        yield
    finally:
        present = iter(optimizer.param_groups)
        for group in groups:  # the caller's own dicts stay the groups, with what was set
            if group["params"]:
                group.update(next(present))
        optimizer.param_groups = groups
        if optimizer.state is empty:
            optimizer.state = state


def _is_partial(optimizer: torch.optim.Optimizer) -> bool:
    """Whether each rank has the state of some parameters only, though DDP has them all on each rank."""
    loaded = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")  # importing it is slow and warns
    return loaded is not None and isinstance(optimizer, loaded.ZeroRedundancyOptimizer)


def _names(root: torch.nn.Module, wanted: Iterable[int]) -> dict[int, tuple[str, ...]]:
    ids = set(wanted)
    return {
        id(parameter): canonical_names(root, name)
        for name, parameter in root.named_parameters()
        if id(parameter) in ids
    }


def _not_owned(key: str, optimizer: torch.optim.Optimizer, missing: set[int], module_count: int) -> InvalidState:
    places = [
        f"parameter {index} of group {number} (shape {list(parameter.shape)})"
        for number, group in enumerate(optimizer.param_groups)
        for index, parameter in enumerate(group["params"])
        if id(parameter) in missing
    ]
    return InvalidState(
        f"the optimizer at {key!r} has parameters that no module of the state owns: {', '.join(places)}",
        hint="Make the optimizer after the module is wrapped or sharded"
        if module_count
        else "Put the module into the state as well: it names the parameters",
    )
