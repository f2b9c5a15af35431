"""The contents that an optimizer contributes to a state: its own `state_dict`, under the names of its parameters.

`state.<parameter>.<item>` is one item of the state of one parameter, `param_groups.<parameter>.<setting>` one setting
of its group, where `<parameter>` is the key of the parameter itself: the same for every parallel layout, and however
many modules the optimizer is over. Stock readers see torch's own names, without the key of the module: see
`ckptstore.stock.stock_write`. `Optimizer.state_dict` alone numbers the parameters, and a new optimizer would
silently load nothing of it. State that belongs to no parameter has separate keys: `state_of_all`,
`settings_of_empty_groups`, and `more` for entries beside torch's two.

Under FSDP1, whose flat parameters have several names each, torch's helper reads and writes: see `optimizer_fsdp1`.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ckptstore.errors import InvalidState
from ckptstore.runtime.torch_private import canonical_names
from ckptstore.state.live.alike import alike
from ckptstore.state.live.contents import StoredContents
from ckptstore.state.live.flatten import (
    FlatState,
    Path,
    Replicated,
    TensorEntry,
    TensorRef,
    Unit,
    find_tensors,
    join_path,
    map_tensors,
    references_in,
)
from ckptstore.state.live.matching import Matching
from ckptstore.state.live.modules import blaming
from ckptstore.state.tensors.boxes import whole
from ckptstore.state.tensors.overlap import Conflict, FilledBox, PlacedTensor

STATE, GROUPS = "state", "param_groups"
STATE_OF_ALL, EMPTY_GROUPS, MORE = "state_of_all", "settings_of_empty_groups", "more"
NOT_SETTINGS = frozenset({"params", "param_names"})
"""Items of a group that list its parameters. Names of parameters are those of the modules."""


@dataclass(frozen=True, slots=True)
class Scope:
    """The names of the parameters of one optimizer: as the checkpoint names the parameters themselves.

    `root` is the module that owns them all: one of the state, or a holder of several, whose children are then called
    "0", "1", ... `prefixes` has the beginning of a name in `root`, and the one that it has in the checkpoint. `names`
    has, by the id of a parameter, its names in the checkpoint: several for FSDP1's flat parameters.
    """

    root: torch.nn.Module
    prefixes: tuple[tuple[str, str], ...]
    names: dict[int, tuple[str, ...]]

    def public(self, name: str) -> str:
        """Return the name in the checkpoint of `name` in `root`."""
        return next(new + name.removeprefix(old) for old, new in self.prefixes if name.startswith(old))

    def private(self, name: str) -> str:
        """Invert `public`: return the name in `root`."""
        return next((old + name.removeprefix(new) for old, new in self.prefixes if name.startswith(new)), name)

    def of(self, parameter: torch.Tensor) -> tuple[str, ...]:
        return self.names[id(parameter)]

    def fitting(self, key: str, matching: Matching) -> Scope:
        """Return the scope itself; or the scope without the key of the only module, if the names that the checkpoint
        has below the key of the optimizer lack it, as those of torch's own functions do."""
        flat_names = [name.removeprefix(f"{key}.") for name in matching.below(key)]
        if len(self.prefixes) > 1 or self._names_any(flat_names):
            return self
        ((old, new),) = self.prefixes
        plain = {item: tuple(name.removeprefix(new) for name in each) for item, each in self.names.items()}
        found = Scope(self.root, ((old, ""),), plain)
        return found if found._names_any(flat_names) else self

    def _names_any(self, flat_names: Sequence[str]) -> bool:
        names = {name for names in self.names.values() for name in names}
        return any(split_name(name, names) for name in flat_names)


def scope_of(key: str, optimizer: torch.optim.Optimizer, modules: Sequence[tuple[str, torch.nn.Module]]) -> Scope:
    """Find the modules of the state that own an optimizer's parameters, by identity.

    Take the first module that owns them all, else each module, in the order of the state, that owns any of those still
    missing. A name begins with the key of its module, however many there are. Raises InvalidState, with group and
    index, for a parameter that none owns.
    """
    wanted = {id(parameter): parameter for group in optimizer.param_groups for parameter in group["params"]}
    owned = [(name, module, {id(parameter) for parameter in module.parameters()}) for name, module in modules]
    for name, module, ids in owned:
        if wanted.keys() <= ids:
            return _named(module, (("", f"{name}."),), wanted.keys())
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
    return _named(root, tuple((f"{index}.", f"{name}.") for index, (name, _) in enumerate(chosen)), wanted.keys())


def _named(root: torch.nn.Module, prefixes: tuple[tuple[str, str], ...], wanted: Collection[int]) -> Scope:
    scope = Scope(root, prefixes, {})
    names = {
        id(parameter): tuple(map(scope.public, canonical_names(root, name)))
        for name, parameter in root.named_parameters()
        if id(parameter) in wanted
    }
    return Scope(root, prefixes, names)


def collect_optimizer(
    flat: FlatState, path: Path, optimizer: torch.optim.Optimizer, scope: Scope, same: Mapping[int, bool]
) -> None:
    """Take an optimizer into a flat state. The state of a parameter that DDP keeps equal is equal itself.

    Changes nothing. The tensors are the live ones. An optimizer whose `state_dict` is not torch's two entries for its
    own parameters is taken as one value. Raises InvalidState when its `state_dict` raises.
    """
    with blaming(f"the optimizer at {join_path(path)!r}"):
        part = partition_of(optimizer)
        packed: Mapping[str, Any] = part.state_dict()
    equal = same if part is optimizer else {}
    parameters = numbered(part)
    if not _is_of(packed, parameters):
        flat.add_value(path, packed)
        return
    more = {name: item for name, item in packed.items() if name not in (STATE, GROUPS)}
    of_all = {}
    for number, items in packed[STATE].items():
        if number in parameters:
            (name,) = scope.of(parameters[number])
            _add_state(flat, (*path, f"{STATE}.{name}"), items, is_equal=equal.get(id(parameters[number])) is False)
        else:
            of_all[number] = items
    for group in optimizer.param_groups:
        settings = settings_of(group)
        for parameter in group["params"]:
            (name,) = scope.of(parameter)
            for item, value in settings.items():
                add_item(flat, (*path, f"{GROUPS}.{name}.{item}"), value)
    empty = settings_of_empty(optimizer)
    for name, value in ((STATE_OF_ALL, of_all), (EMPTY_GROUPS, empty), (MORE, more)):
        if value:
            flat.add_value((*path, name), value)


def partition_of(optimizer: Any) -> torch.optim.Optimizer:
    """Return the optimizer itself, or for a ZeroRedundancyOptimizer the one that has the state of this rank's
    parameters.

    Raises InvalidState for one that has not made it yet.
    """
    loaded = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")  # importing it is slow and warns
    if loaded is None or not isinstance(optimizer, loaded.ZeroRedundancyOptimizer):
        return optimizer  # type: ignore[no-any-return]
    inner = getattr(optimizer, "optim", None)
    if not isinstance(inner, torch.optim.Optimizer):
        raise InvalidState(
            "a ZeroRedundancyOptimizer with overlap_with_ddp has no state before its first steps",
            hint="Save and load after three backward passes, or make it without overlap_with_ddp",
        )
    return inner


def numbered(optimizer: torch.optim.Optimizer) -> dict[int, torch.Tensor]:
    """Return the parameters by their numbers in `Optimizer.state_dict`."""
    return dict(enumerate({id(parameter): parameter for parameter in parameters_of(optimizer)}.values()))


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the items of a group that do not list its parameters."""
    return {item: value for item, value in group.items() if item not in NOT_SETTINGS}


def settings_of_empty(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the settings of the groups that have no parameter under whose name they could be stored."""
    return [settings_of(group) for group in optimizer.param_groups if not group["params"]]


def split_name(flat_name: str, parameters: Collection[str]) -> tuple[str, str, str] | None:
    """Return section, parameter and item of a flat name, None when it is not that of one of the parameters."""
    section, _, rest = flat_name.partition(".")
    parameter, item = rest, ""
    while parameter and parameter not in parameters:
        parameter, _, last = parameter.rpartition(".")
        item = f"{last}.{item}" if item else last
    return (section, parameter, item) if parameter and section in (STATE, GROUPS) else None


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _add_state(flat: FlatState, path: Path, items: Any, *, is_equal: bool) -> None:
    """Add the state of one parameter: item by item, or as one value if their names are not simply text."""
    if not isinstance(items, Mapping) or not all(isinstance(item, str) and item and "." not in item for item in items):
        add_item(flat, path, items, is_equal=is_equal)
        return
    for item, value in items.items():
        add_item(flat, (*path[:-1], f"{path[-1]}.{item}"), value, is_equal=is_equal)


def add_item(flat: FlatState, path: Path, value: Any, *, is_equal: bool = False) -> None:
    """Take in one item of an optimizer. With `is_equal` it is the same on all ranks."""
    if isinstance(value, torch.Tensor):
        flat.add_tensor(path, TensorEntry(value, is_equal))
    else:
        flat.add_value(path, map_tensors(value, path, lambda _, leaf: Replicated(leaf)) if is_equal else value)


def _is_of(packed: Any, parameters: Mapping[int, torch.Tensor]) -> bool:
    """Return True if a state dict is torch's: of these parameters, by number."""
    if not isinstance(packed, Mapping) or not isinstance(packed.get(STATE), Mapping):
        return False
    groups = packed.get(GROUPS)
    if not isinstance(groups, list | tuple) or not all(isinstance(group, Mapping) for group in groups):
        return False
    numbers = [number for group in groups for number in group.get("params", ())]
    return set(numbers) == parameters.keys()


def _not_owned(key: str, optimizer: torch.optim.Optimizer, missing: set[int], module_count: int) -> InvalidState:
    places = [
        f"parameter {index} of group {number} (shape {list(parameter.shape)})"
        for number, group in enumerate(optimizer.param_groups)
        for index, parameter in enumerate(group["params"])
        if id(parameter) in missing
    ]
    more = f" and {len(places) - 10} more" if len(places) > 10 else ""
    return InvalidState(
        f"the optimizer at {key!r} has parameters that no module of the state owns: {', '.join(places[:10])}{more}",
        hint="Make the optimizer after the module is wrapped or sharded, and put parameters that are in no module into "
        "an nn.ParameterDict of the state"
        if module_count
        else "Put the module into the state as well: it names the parameters",
    )


_ABSENT = object()


class Hyperparameters:
    """The settings that the checkpoint has for the groups of one optimizer.

    A group gets all settings that were saved for its parameters, also those that it does not have now (a scheduler's
    `initial_lr`). Settings that the optimizer's class fills in for checkpoints of older releases are filled in. All
    parameters of a group that were saved must have been saved with the same values.
    """

    def __init__(self, unit: Unit, scope: Scope, matching: Matching) -> None:
        self._unit = unit
        self._optimizer: torch.optim.Optimizer = unit.item
        self._matching = matching
        self._names = [
            [name for parameter in group["params"] for name in scope.of(parameter)]
            for group in self._optimizer.param_groups
        ]
        self._saved = self._saved_by_parameter()
        self.known = frozenset(self._saved)
        """The parameters of which the checkpoint has settings, even if `include` leaves these out."""
        self.foreign: set[str] = set()
        """The parameters that were saved by another kind of optimizer: settings that this one needs are missing."""
        self._loaded = [self._match(number) for number in range(len(self._names))]
        self._empty = self._match_empty()

    def loaded(self, number: int) -> dict[str, Any]:
        """Return the settings that are loaded for one group, once the tensors have been filled."""
        if not self._names[number]:
            place = sum(not names for names in self._names[:number])
            return {} if self._empty is None else dict(self._empty.result()[place])
        found = self._loaded[number].items()
        return {item: value.result() if isinstance(value, StoredContents) else value for item, value in found}

    def packed(self, number: int, group: Mapping[str, Any], params: list[Any]) -> dict[str, Any]:
        """Return a group as `Optimizer.state_dict` packs it, with the loaded settings."""
        return {**settings_of(group), **self.loaded(number), "params": params}

    def plain(self, number: int) -> dict[str, Any]:
        """Return the settings loaded for one group that hold no tensors."""
        return {item: value for item, value in self._loaded[number].items() if not isinstance(value, StoredContents)}

    def apply(self, optimizer: torch.optim.Optimizer) -> None:
        """Set the loaded settings: the same objects, where torch sets copies."""
        for number, group in enumerate(optimizer.param_groups):
            group.update(self.loaded(number))

    def _match_empty(self) -> StoredContents | None:
        """Match the settings of groups without parameters; leave them without a place if there are more or fewer of
        them now."""
        saved = self._matching.saved.values.get(f"{self._unit.key}.{EMPTY_GROUPS}")
        present = settings_of_empty(self._optimizer)
        if not isinstance(saved, list) or len(saved) != len(present):
            return None
        tensors = (item for _, item in find_tensors(present, ()) if isinstance(item, torch.Tensor))
        device = next((tensor.device for tensor in tensors), None)
        return StoredContents((*self._unit.path, EMPTY_GROUPS), None, self._matching, fixed=False, device=device)

    def _saved_by_parameter(self) -> dict[str, dict[str, str]]:
        """Return the key of each setting, for each parameter. A key of a tensor inside a value is not a setting."""
        known = {name for names in self._names for name in names}
        saved: dict[str, dict[str, str]] = defaultdict(dict)
        values = self._matching.saved.values
        for key in self._matching.below(f"{self._unit.key}.{GROUPS}"):
            split = split_name(key.removeprefix(f"{self._unit.key}."), known)
            if split is None:
                continue
            self._matching.placed(key)
            _, name, item = split
            whole = f"{self._unit.key}.{GROUPS}.{name}.{item.partition('.')[0]}"
            if key == whole or whole not in values:
                saved[name][item] = key
        return dict(saved)

    def _match(self, number: int) -> dict[str, Any]:
        """Match the settings that are loaded for one group."""
        group, names = self._optimizer.param_groups[number], self._names[number]
        for name in names:
            if name not in self._saved:
                for item in group.keys() - NOT_SETTINGS:
                    self._miss(name, item)
        known = [name for name in names if name in self._saved]
        if not known:
            return {}
        first = self._saved[known[0]]
        found = {
            item: self._value(key, item, group.get(item)) for item, key in first.items() if self._matching.includes(key)
        }
        for item in sorted((group.keys() | {item for name in known for item in self._saved[name]}) - NOT_SETTINGS):
            self._compare(known, item, found, filled=_ABSENT if item in first else self._filled(number, item))
        return found

    def _compare(self, known: list[str], item: str, found: dict[str, Any], *, filled: Any) -> None:
        """Note the parameters of one group that were not saved with the same value."""
        if filled is not _ABSENT and not any(item in self._saved[name] for name in known):
            found[item] = filled
            return
        first = self._saved[known[0]].get(item)
        for name in known:
            own = self._saved[name].get(item)
            if own is None:
                self._miss(name, item)
                if item in self._optimizer.defaults:
                    self.foreign.add(name)
            elif self._matching.includes(own) and not self._agree(own, first, item):
                self._matching.mismatch.differing[own] = (
                    f"is {self._shown(own)} in the checkpoint, and other parameters of the same group have another "
                    f"{item}"
                )

    def _miss(self, name: str, item: str) -> None:
        key = f"{self._unit.key}.{GROUPS}.{name}.{item}"
        if self._matching.includes(key):
            self._matching.miss(key, "a hyperparameter")

    def _value(self, key: str, item: str, current: Any) -> Any:
        """Return the saved value, or the tensor to be filled if a tensor was saved: the present one if it fits."""
        source = self._matching.source_of(key)
        if source is None:
            value = self._matching.saved.values[key]
            if not references_in(value):
                return value
            path = (*self._unit.path, key.removeprefix(f"{self._unit.key}."))
            return StoredContents(path, current, self._matching, fixed=False, device=None)
        saved = self._matching.saved.tensors[source]
        form = saved.torch_dtype, saved.shape
        if isinstance(current, torch.Tensor) and (current.dtype, tuple(current.shape)) == form:
            self._matching.take_tensor([key], current)
            return current
        return self._matching.make_tensor(key, current.device if isinstance(current, torch.Tensor) else None)

    def _agree(self, key: str, other: str | None, item: str) -> bool:
        """Return True if one value was saved under two keys. The numbers of tensors with keys of their own are compared
        with those of all tensors that the state has once, before anything is filled."""
        if other is None:
            return False
        values = self._matching.saved.values
        own, first = (values[name] if name in values else TensorRef(name) for name in (key, other))
        return alike(own, first, lambda one, another: self._shares(key, one.key, another.key, item))

    def _shares(self, key: str, own: str, first: str, item: str) -> bool:
        """Return False if two tensors have different forms. Note them to be compared otherwise, for the setting at
        `key`, unless they are one."""
        matching = self._matching
        sources = [matching.source_of(name) for name in (first, own)]
        if sources[0] == sources[1]:
            return True
        known = [matching.saved.tensors[source] for source in sources if source is not None]
        if len(known) < 2 or known[0].form != known[1].form:
            return False
        dtype, shape = known[0].torch_dtype, known[0].shape
        shown = torch.empty(shape, dtype=dtype, device="meta")
        before, after = (FilledBox(PlacedTensor(key, shown, it.key, dtype), whole(shape), shown) for it in known)
        reason = f"has other numbers in the checkpoint than {first}, and parameters of one group share their {item}"
        matching.shared.append(Conflict(before, after, is_same=True, reason=reason))
        return True

    def _shown(self, key: str) -> str:
        """Return a saved setting in words."""
        saved, source = self._matching.saved, self._matching.source_of(key)
        return repr(saved.values.get(key)) if source is None else str(saved.tensors[source])

    def _filled(self, number: int, item: str) -> Any:
        """Return the value that the optimizer's class sets in a group that lacks an item, as it does for checkpoints of
        older releases."""
        optimizer = self._optimizer
        group = {name: value for name, value in optimizer.param_groups[number].items() if name not in (item, "params")}
        probe = object.__new__(type(optimizer))
        try:
            probe.__setstate__(
                {
                    "defaults": dict(optimizer.defaults),
                    "state": defaultdict(dict),
                    "param_groups": [{**group, "params": []}],
                }
            )
        except Exception:  # optimizers are the user's, and so are their errors: then nothing is filled in
            return _ABSENT
        return probe.param_groups[0].get(item, _ABSENT)
