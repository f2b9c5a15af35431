"""Protection of loaded contents against the code of other objects, which runs later in the same load.

The `load_state_dict` of a scheduler may write its own settings into the groups of an optimizer, that of an object with
averaged weights into a module. A load ends with what was saved, whatever the order of the state.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ckptstore.runtime.torch_private import canonical_names, has_state_dict_hooks, hooks_of_load
from ckptstore.state.live.alike import alike
from ckptstore.state.live.flatten import Kind, Unit, find_tensors, is_loader, join_path, unmarked
from ckptstore.state.live.matching import Target
from ckptstore.state.live.modules import uses_fsdp1
from ckptstore.state.live.optimizers import STATE, settings_of
from ckptstore.state.tensors.overlap import identity_of, local_memory
from ckptstore.state.tensors.placement import is_on_meta
from ckptstore.state.tensors.tensor_memory import fingerprints_of, obstacle_of

_OF_TORCH = ("torch", "torchdata")
_OF_OURS = "ckptstore.state."
"""Packages whose objects write nowhere but into themselves when they are loaded."""

_OTHER = "other numbers"

Fill = Callable[[Mapping[str, Target]], None]
"""Reads tensors into memory, as the load has."""


class Written(NamedTuple):
    """Loaded contents that the code of objects wrote over in the same load, by key, with words on each."""

    restored: dict[str, str]
    differing: dict[str, str]
    """Those that could not be put back, and those that a module set itself, as in its own `load_state_dict`."""


class _HeldTensor(NamedTuple):
    parts: tuple[torch.Tensor, ...]
    fingerprint: bytes


class Held:
    """The contents of the objects of a state as they were loaded.

    Groups of optimizers are always held. Tensors are only if code runs that may write to them: looking at them takes
    two passes over their memory.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        targets: Mapping[str, Target],
        casts: Sequence[tuple[torch.Tensor, torch.Tensor]],
        translated: Collection[str] = (),
    ) -> None:
        self._is_watching = any(map(_runs_own_code, units))
        self._targets = targets
        self._casts = {id(filled): tensor for tensor, filled in casts}
        self._keys: dict[Hashable, str] = {}
        """The key of the target of each plain piece of memory that is filled."""
        for key, target in targets.items() if self._is_watching else ():
            for part in local_memory(self._casts.get(id(target.tensor), target.tensor)):
                self._keys.setdefault(identity_of(part), key)
        self._groups: list[tuple[Unit, list[dict[str, Any]]]] = []
        self._states: list[tuple[Unit, dict[Any, Any]]] = []
        self._units: list[Unit] = []
        self._tensors: dict[str, _HeldTensor] = {}
        self._translated = translated
        self._copies: dict[str, tuple[torch.Tensor, ...]] = {}
        """Copies of tensors that code of a module has made of what was read: they cannot be read again."""
        self._by_modules: dict[str, str] = {}

    def finish(self, unit: Unit, finish: Callable[[], None]) -> None:
        """Let an object take its state, and hold its contents."""
        is_own = self._is_watching and unit.kind is Kind.MODULE and _runs_own_code(unit)
        before = self._look(unit) if is_own and not uses_fsdp1(unit.item) else {}
        finish()
        self.hold(unit)
        for key, held in before.items():
            if key in self._tensors and self._tensors[key].fingerprint != held.fingerprint:
                self._by_modules[key] = f"{_OTHER}, by the own code of the {type(unit.item).__name__}"
                self._copies[key] = tuple(part.clone() for part in self._tensors[key].parts)

    def hold(self, unit: Unit) -> None:
        """Hold the present contents of an object or a value."""
        if isinstance(getattr(unit.item, "param_groups", None), list):
            self._groups.append((unit, [_copied(group) for group in unit.item.param_groups]))
        if not self._is_watching or unit.kind not in (Kind.MODULE, Kind.OPTIMIZER, Kind.VALUE):
            return
        self._units.append(unit)
        looked = self._look(unit)
        self._tensors |= looked
        for key, (parts, _) in looked.items():
            if not self._is_shown_as_copies(unit) and not any(identity_of(part) in self._keys for part in parts):
                self._copies[key] = tuple(part.clone() for part in parts)
        if isinstance(unit.item, torch.optim.Optimizer):
            self._states.append((unit, {owner: _items(items) for owner, items in unit.item.state.items()}))

    def restore(self, fill: Fill) -> Written:
        """Put back everything that was written over since, and return it."""
        written = Written({}, dict(self._by_modules))
        for unit, groups in self._groups:
            _restore_groups(unit, groups, written)
        for unit, state in self._states:
            _restore_state(unit, state, written)
        now = self._look_at_all()
        lost = self._lost(now)
        if lost:
            self._fill_again(lost, fill)
            for key in lost:
                self._put_back(key, now.get(key))
            left = self._lost(self._look_at_all())
            written.differing.update(dict.fromkeys(left, _OTHER))
            written.restored.update(dict.fromkeys(set(lost).difference(left), _OTHER))
        return written

    def _look_at_all(self) -> dict[str, _HeldTensor]:
        return {key: held for unit in self._units for key, held in self._look(unit).items()}

    def _lost(self, now: Mapping[str, _HeldTensor]) -> list[str]:
        """Return the keys of held tensors that have other numbers now."""
        return [key for key, (_, held) in self._tensors.items() if key not in now or now[key].fingerprint != held]

    def _fill_again(self, lost: Sequence[str], fill: Fill) -> None:
        """Read the memory that was loaded once more, where its numbers are others now."""
        parts = {key: self._tensors[key].parts for key in lost}
        prints = fingerprints_of(parts)
        changed = [part for key in lost if prints[key] != self._tensors[key].fingerprint for part in parts[key]]
        keys = {key for part in changed if (key := self._keys.get(identity_of(part))) is not None}
        again = {key: self._targets[key] for key in sorted(keys)}
        fill({key: target for key, target in again.items() if id(target.tensor) not in self._casts})
        with torch.inference_mode():
            for key in lost:
                for part, copied in zip(parts[key], self._copies.get(key, ()), strict=False):
                    part.copy_(copied)
            for target in again.values():
                if (tensor := self._casts.get(id(target.tensor))) is not None:
                    tensor.copy_(target.tensor)

    def _put_back(self, key: str, now: _HeldTensor | None) -> None:
        """Copy what was loaded into the memory that an object has got in place of its own."""
        held = self._tensors[key].parts
        if now is None or len(now.parts) != len(held):
            return
        with torch.inference_mode():
            for own, part in zip(now.parts, held, strict=True):
                if identity_of(own) != identity_of(part) and (own.dtype, own.shape) == (part.dtype, part.shape):
                    own.copy_(part)

    def _look(self, unit: Unit) -> dict[str, _HeldTensor]:
        """Return the tensors of an object that were loaded, by key."""
        parts: dict[str, tuple[torch.Tensor, ...]] = {}
        for name, tensor in _tensors_of(unit):
            if obstacle_of(tensor) is None and not is_on_meta(tensor):
                memory = tuple(part.detach() for part in local_memory(tensor))
                is_target = any(identity_of(part) in self._keys for part in memory)
                is_known = is_target or name in self._tensors or name in self._translated or name in self._targets
                if is_known or self._is_shown_as_copies(unit):
                    parts[name] = memory
        prints = fingerprints_of({key: memory for key, memory in parts.items() if memory})
        return {key: _HeldTensor(parts[key], found) for key, found in prints.items()}

    def _is_shown_as_copies(self, unit: Unit) -> bool:
        """Return True for a module under FSDP1 that is loaded: its memory is no target."""
        is_fsdp1 = unit.kind is Kind.MODULE and uses_fsdp1(unit.item)
        return is_fsdp1 and any(key.startswith(f"{unit.key}.") for key in self._targets)


def _tensors_of(unit: Unit) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a module, an optimizer or a value, each with a name."""
    if unit.kind is Kind.MODULE:
        for name, tensor in (*unit.item.named_parameters(), *unit.item.named_buffers()):
            yield ", ".join(f"{unit.key}.{part}" for part in canonical_names(unit.item, name)), tensor
        return
    values = [unit.item] if unit.kind is Kind.VALUE else [*unit.item.state.values()]
    for number, value in enumerate(values):
        path = unit.path if unit.kind is Kind.VALUE else (*unit.path, STATE, number)
        for inner, leaf in find_tensors(value, path):
            yield join_path(inner), unmarked(leaf)


def _restore_groups(unit: Unit, held: Sequence[Mapping[str, Any]], written: Written) -> None:
    """Put back the settings of groups that are others than `held`."""
    present = unit.item.param_groups
    if len(present) != len(held):
        written.differing[f"{unit.key}.param_groups"] = f"{len(present)} groups, {len(held)} were loaded"
    for number, (group, saved) in enumerate(zip(present, held, strict=False)):
        for item, (value, numbers) in saved.items():
            if item in group and _is_same(group[item], value, numbers):
                continue
            now = repr(group[item]) if item in group else "nothing"
            if isinstance(value, torch.Tensor):
                with torch.inference_mode():
                    value.copy_(numbers)
            group[item] = value if isinstance(value, torch.Tensor) else numbers
            written.restored[f"{unit.key}.param_groups.{number}.{item}"] = f"{now} in place of {group[item]!r}"
        for item in settings_of(group).keys() - saved.keys():
            written.differing[f"{unit.key}.param_groups.{number}.{item}"] = "a setting that was not loaded"


def _restore_state(unit: Unit, held: Mapping[Any, Any], written: Written) -> None:
    """Put back the objects in the state of an optimizer that are others than `held`."""
    state: dict[Any, Any] = unit.item.state
    if [*map(id, state)] == [*map(id, held)] and all(alike(_items(state[owner]), held[owner]) for owner in held):
        return
    state.clear()
    state.update({owner: _items(items) for owner, items in held.items()})
    written.restored[f"{unit.key}.{STATE}"] = "other objects"


def _copied(group: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return each setting of a group with a copy of what it is now."""
    return {
        item: (value, value.detach().clone() if isinstance(value, torch.Tensor) else copy.copy(value))
        for item, value in settings_of(group).items()
    }


def _is_same(now: Any, value: Any, numbers: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return now is value and fingerprints_of({"": (value,)}) == fingerprints_of({"": (numbers,)})
    return alike(now, numbers)


def _items(items: Any) -> Any:
    """Return the state of one parameter in a dict of its own."""
    return dict(items) if isinstance(items, dict) else items


def _runs_own_code(unit: Unit) -> bool:
    """Return True if code that is neither torch's nor ours runs when an object takes its state."""
    item: Any = unit.item
    if unit.kind is Kind.VALUE:
        return False
    if unit.kind is Kind.MODULE:
        return any(map(_loads_by_own_code, item.modules()))
    if unit.kind is Kind.OPTIMIZER:
        return not _is_known(type(item).load_state_dict) or has_state_dict_hooks(item)
    return not (_is_known(type(item)) or is_loader(item))


def _loads_by_own_code(module: torch.nn.Module) -> bool:
    kind = type(module)
    methods = (kind.set_extra_state, kind.load_state_dict, kind._load_from_state_dict, *hooks_of_load(module))
    return not all(map(_is_known, methods))


def _is_known(code: Any) -> bool:
    """Return True if a class or function is torch's or ours."""
    name = str(getattr(getattr(code, "func", code), "__module__", ""))
    return name.split(".", 1)[0] in _OF_TORCH or name.startswith(_OF_OURS)
