"""Optimizers under FSDP1: torch's helper takes flat parameters apart, and puts them together.

Left to itself the helper steps an optimizer that has no state, and with it changes the run. This module shows it such
an optimizer unchanged, and a load adds the state that the checkpoint has.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

from ckptstore.errors import InvalidState, StateMismatch
from ckptstore.runtime.torch_private import canonical_names, fsdp1_names, is_tensor_parallel_fsdp1, is_wrapper
from ckptstore.state.live.flatten import FlatState, Path, Unit, join_path, references_in
from ckptstore.state.live.matching import Matching
from ckptstore.state.live.modules import blaming, in_shards, quiet_torch, state_dict_type_kept
from ckptstore.state.live.optimizers import (
    EMPTY_GROUPS,
    GROUPS,
    STATE,
    Hyperparameters,
    Scope,
    add_item,
    parameters_of,
    settings_of_empty,
    split_name,
)

_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True, strict=False)


class _KeptEmpty(defaultdict[Any, Any]):
    """An empty state that torch's helper takes for an existing one, so that it does not create one."""

    def __bool__(self) -> bool:
        return True


def read_flat(key: str, optimizer: torch.optim.Optimizer, scope: Scope) -> dict[str, Any]:
    """Return the flat contents of an optimizer, under the names of the checkpoint. Collective. Changes nothing.

    Raises InvalidState when torch cannot return them, or returns wrong ones: under FSDP1 over tensor parallelism, every
    tensor parallel rank would get the state of the first.
    """
    if any(map(is_tensor_parallel_fsdp1, scope.root.modules())):
        raise InvalidState(
            f"the optimizer at {key!r} is of parameters under FSDP1 and tensor parallelism: torch gives the state of "
            f"the first tensor parallel rank for all of them",
            hint="Use FSDP2 (fully_shard) with tensor parallelism; the module alone can be saved",
        )
    _refuse_uncommon(key, optimizer, scope.root)
    stateless = [item for item in _all_parameters(optimizer, scope.root) if not optimizer.state.get(item)]
    with (
        _as_it_is(optimizer),
        _frozen(stateless),
        quiet_torch(),
        blaming(f"the optimizer at {key!r}"),
        state_dict_type_kept(scope.root),
    ):
        if not optimizer.param_groups:
            return {}
        flat = get_optimizer_state_dict(scope.root, optimizer, options=_OPTIONS)
    named = {_public(name, scope): item for name, item in flat.items()}
    return {name: item for name, item in named.items() if not name.endswith(".param_names")}


def collect_fsdp1_optimizer(
    flat: FlatState, path: Path, optimizer: torch.optim.Optimizer, scope: Scope, same: Mapping[int, bool]
) -> None:
    """Take an optimizer into a flat state; see `optimizers.collect_optimizer`. Collective."""
    equal = {name for item in parameters_of(optimizer) if same.get(id(item)) is False for name in scope.of(item)}
    for name, item in read_flat(join_path(path), optimizer, scope).items():
        split = split_name(name, equal)
        # torch's helper shows one count for all that a flat parameter has: a load would make it one for all of them.
        own = item.clone() if isinstance(item, torch.Tensor) and item.dim() == 0 else item
        add_item(flat, (*path, name), own, is_equal=split is not None and split[0] == STATE)
    if empty := settings_of_empty(optimizer):
        flat.add_value((*path, EMPTY_GROUPS), empty)


class Fsdp1OptimizerLoad:
    """One optimizer of the state, over modules under FSDP1. Collective."""

    def __init__(self, unit: Unit, scope: Scope, matching: Matching) -> None:
        self._unit = unit
        self._optimizer: torch.optim.Optimizer = unit.item
        self._scope = scope = scope.fitting(unit.key, matching)
        self._matching = matching
        self._owners = {name: item for item in parameters_of(self._optimizer) for name in scope.of(item)}
        self._values: dict[str, Any] = {}
        self._hyperparameters = Hyperparameters(unit, scope, matching)
        self._fsdp1_names = fsdp1_names(scope.root)
        self._flat = read_flat(unit.key, self._optimizer, scope)
        self._add_missing()
        self._match_state()
        self._check_flat_parameters()

    def finish(self) -> None:
        """Put everything into its place, once the tensors have been filled."""
        self._flat.update(self._values)
        before = dict(self._optimizer.state)
        state: dict[str, dict[str, Any]] = defaultdict(dict)
        owned: set[int] = set()
        for flat_name, parameter, item in self._state_items(self._flat):
            state[self._private(parameter)][item] = self._flat[flat_name]
            owned.add(id(self._owners[parameter]))
        stateless = [item for item in _all_parameters(self._optimizer, self._scope.root) if id(item) not in owned]
        if self._optimizer.param_groups:
            packed: Any = {STATE: dict(state), GROUPS: self._packed_groups()}
            with (
                _as_it_is(self._optimizer),
                _frozen(stateless),
                quiet_torch(),
                blaming(f"the optimizer at {self._unit.key!r}"),
                in_shards(self._scope.root),
            ):
                # set_optimizer_state_dict calls the same two, and fails on the names of activation checkpointing
                own = FullyShardedDataParallel.optim_state_dict_to_load(self._scope.root, self._optimizer, packed)
                self._optimizer.load_state_dict(own)
        for owner in parameters_of(self._optimizer):
            if owner in self._optimizer.state and not self._optimizer.state[owner]:
                del self._optimizer.state[owner]
            if owner not in self._optimizer.state and not owner.numel() and before.get(owner):
                self._optimizer.state[owner] = before[owner]  # made before any step; the helper leaves it out
        self._hyperparameters.apply(self._optimizer)

    def _state_items(self, flat_names: Iterable[str]) -> Iterator[tuple[str, str, str]]:
        """Yield name, parameter and item of each flat name that is of the state of a parameter."""
        for name in flat_names:
            split = split_name(name, self._owners)
            if split is not None and split[0] == STATE:
                yield name, split[1], split[2]

    def _private(self, name: str) -> str:
        """Return FSDP1's name of a parameter of the checkpoint."""
        own = self._scope.private(name)
        return self._fsdp1_names.get(own, own)

    def _packed_groups(self) -> list[dict[str, Any]]:
        """Return the groups that have parameters, by the names that torch's setter knows, with the loaded settings."""
        return [
            self._hyperparameters.packed(
                number, group, [self._private(name) for item in group["params"] for name in self._scope.of(item)]
            )
            for number, group in enumerate(self._optimizer.param_groups)
            if group["params"]
        ]

    def _add_missing(self) -> None:
        """Allocate the state that only the checkpoint has, divided as the parameter is. Drop the state that the
        checkpoint lacks of parameters that it knows."""
        matching, prefix = self._matching, f"{self._unit.key}."
        saved: dict[str, dict[str, None]] = defaultdict(dict)  # ordered: torch's helper exchanges item after item
        stored = (key.removeprefix(prefix) for key in matching.below(f"{prefix}{STATE}"))
        for _, parameter, item in self._state_items(stored):
            saved[parameter][item] = None
        for name, parameter, item in list(self._state_items(self._flat)):
            is_known = parameter in self._hyperparameters.known and matching.includes(f"{prefix}{name}")
            if is_known and item not in saved[parameter]:
                del self._flat[name]
        root = self._scope.root
        with quiet_torch(), blaming(f"the optimizer at {self._unit.key!r}"), state_dict_type_kept(root):
            shown = get_model_state_dict(root, options=StateDictOptions(strict=False))
        parts = {self._scope.public(canonical_names(root, name)[0]): item for name, item in shown.items()}
        for parameter, items in saved.items():
            for item in items:
                name = f"{STATE}.{parameter}.{item}"
                if name not in self._flat and matching.includes(prefix + name):
                    self._add_item(name, f"{STATE}.{parameter}.{item.partition('.')[0]}", parts.get(parameter))

    def _add_item(self, name: str, outer: str, like: Any) -> None:
        """Add one item of the checkpoint, or note why FSDP1 cannot take it. `outer` is the outermost item that may
        contain it, and `like` is the parameter."""
        matching, key, whole = self._matching, f"{self._unit.key}.{name}", f"{self._unit.key}.{outer}"
        if references_in(matching.saved.values.get(whole)):
            matching.refuse(whole, StateMismatch("it holds tensors inside, and FSDP1 takes plain ones alone"))
            return
        source = matching.source_of(key)
        if source is None:
            self._flat[name] = matching.saved.values.get(key)
            return
        stored = matching.saved.tensors[source]
        if isinstance(like, torch.Tensor) and tuple(like.size()) == stored.shape and stored.shape:
            self._flat[name] = torch.empty_like(like, dtype=stored.torch_dtype)
        elif not stored.shape or not _divides(self._scope.root):
            self._flat[name] = torch.empty(stored.shape, dtype=stored.torch_dtype, device="cpu")
        else:
            matching.refuse(key, StateMismatch(f"it is {stored}, and FSDP1 divides what is like the parameter"))

    def _match_state(self) -> None:
        matching, saved = self._matching, self._matching.saved
        for name, item in self._flat.items():
            key = f"{self._unit.key}.{name}"
            if not name.startswith(f"{STATE}.") or not matching.includes(key):
                continue
            if isinstance(item, torch.Tensor):
                if item.dim() == 0 and isinstance(saved.values.get(key), int | float):  # as older releases count
                    matching.placed(key)
                    self._values[name] = torch.full_like(item, saved.values[key])
                else:
                    matching.take_tensor([key], item)
            elif key in saved.values:
                matching.placed(key)
                self._values[name] = saved.values[key]
            else:
                matching.miss(key, "a plain value")

    def _check_flat_parameters(self) -> None:
        """Note parameters that lack an item of state that others of the same flat parameter have."""
        items: dict[str, set[str]] = {name: set() for name in self._owners}
        for _, parameter, item in self._state_items(self._flat):
            items[parameter].add(item)
        for owner in parameters_of(self._optimizer):
            names = self._scope.of(owner)
            for name in names:
                lacking = set().union(*(items[other] for other in names)) - items[name]
                if lacking:
                    self._matching.mismatch.differing[f"{self._unit.key}.{STATE}.{name}"] = (
                        f"has no {min(lacking)}, as others have with which FSDP1 keeps it in one flat parameter"
                    )


def _all_parameters(optimizer: torch.optim.Optimizer, root: torch.nn.Module) -> list[torch.Tensor]:
    """Return the parameters of the optimizer, and those of the module alone: torch's helper needs the state of all that
    train."""
    return list({id(item): item for item in (*parameters_of(optimizer), *root.parameters())}.values())


def _divides(root: torch.nn.Module) -> bool:
    """Return True if FSDP1 divides any parameters; alone on its mesh it does not, and takes state of any shape."""
    modules = (item for item in root.modules() if isinstance(item, FullyShardedDataParallel))
    return any(item.sharding_strategy is not ShardingStrategy.NO_SHARD for item in modules)


def _refuse_uncommon(key: str, optimizer: torch.optim.Optimizer, root: torch.nn.Module) -> None:
    """Raise InvalidState for state that torch's helper leaves out, or that makes it raise on some ranks while the
    others wait for minutes: parts below a size are not wrapped, and some ranks have no part. All ranks raise alike.
    Collective."""
    modules = [module for module in root.modules() if isinstance(module, FullyShardedDataParallel)]
    groups = {id(module.process_group): module.process_group for module in modules}
    kinds = set(_uncommon(optimizer))
    for group in groups.values():
        found: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(found, min(kinds, default=""), group=group)
        kinds.update(filter(None, found))
    if kinds:
        raise InvalidState(
            f"the optimizer at {key!r} has {min(kinds)}, and FSDP1 cannot put the parts of several ranks together",
            hint="Use FSDP2 (fully_shard), or an optimizer with plain tensors; the module alone can be saved",
        )


def _uncommon(optimizer: torch.optim.Optimizer) -> Iterator[str]:
    """Yield each kind of state of an optimizer besides tensors and plain values by parameter."""
    state: Mapping[Any, Any] = optimizer.state
    for owner, items in state.items():
        if not isinstance(owner, torch.Tensor) or not isinstance(items, Mapping):
            yield "state that belongs to no parameter"
            continue
        for name, item in items.items():
            if is_wrapper(item):
                yield f"state in tensors that wrap others ({type(item).__name__})"
            elif isinstance(item, list | tuple | Mapping):
                yield f"a {type(item).__name__} in its state ({name!r})"
    if more := optimizer.state_dict().keys() - {STATE, GROUPS}:
        yield f"more than state and groups in its state_dict ({min(more)!r})"


def _public(flat_name: str, scope: Scope) -> str:
    """Return the name in the checkpoint of an entry of torch's helper."""
    section, _, rest = flat_name.partition(".")
    if section not in (STATE, GROUPS):
        return flat_name
    return f"{section}.{scope.public(canonical_names(scope.root, rest)[0])}"


@contextmanager
def _as_it_is(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Show torch's helpers an optimizer without letting them add state to it, and without its groups that have no
    parameters.

    Anything that the helpers set inside stays set.
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
        for group in groups:  # the caller's own dicts stay the groups, with the new settings
            if group["params"]:
                group.update(next(present))
        optimizer.param_groups = groups
        if optimizer.state is empty:
            optimizer.state = state


@contextmanager
def _frozen(parameters: Sequence[torch.Tensor]) -> Iterator[None]:
    """Freeze parameters: torch's setter allows frozen ones to have no state, but not FSDP1's flat ones that train."""
    free = [parameter for parameter in parameters if parameter.requires_grad]
    for parameter in free:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in free:
            parameter.requires_grad_(True)
