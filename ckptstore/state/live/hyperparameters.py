"""Hyperparameters of an optimizer: stored for each parameter, set for each group, with exact types."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch

from ckptstore.state.live.contents import StoredContents
from ckptstore.state.live.flatten import find_tensors, references_in
from ckptstore.state.live.matching import Matching
from ckptstore.state.live.optimizers import EMPTY_GROUPS, GROUPS, NOT_SETTINGS, Scope, settings_of_empty, split_name
from ckptstore.state.live.units import Unit

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
        self._foreign: set[str] = set()
        self._loaded = [self._match(number) for number in range(len(self._names))]
        self._empty = self._match_empty()

    @property
    def foreign(self) -> frozenset[str]:
        """The parameters that were saved by another kind of optimizer: settings that this one needs are missing."""
        return frozenset(self._foreign)

    def loaded(self, number: int) -> dict[str, Any]:
        """Return the settings that are loaded for one group, once the tensors have been filled."""
        if not self._names[number]:
            place = sum(not names for names in self._names[:number])
            return {} if self._empty is None else dict(self._empty.result()[place])
        found = self._loaded[number].items()
        return {item: value.result() if isinstance(value, StoredContents) else value for item, value in found}

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
        saved, present = self._matching.saved.values.get(f"{self._unit.key}.{EMPTY_GROUPS}"), self._optimizer
        if not isinstance(saved, list) or len(saved) != len(settings_of_empty(present)):
            return None
        tensors = (item for _, item in find_tensors(settings_of_empty(present), ()) if isinstance(item, torch.Tensor))
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
        found = {item: self._value(key, item, group.get(item)) for item, key in first.items() if self._includes(key)}
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
                    self._foreign.add(name)
            elif not self._agree(own, first) and self._includes(own):
                self._matching.mismatch.differing[own] = (
                    f"is {self._matching.saved.values.get(own)!r} in the checkpoint, and other parameters "
                    f"of the same group have another {item}"
                )

    def _includes(self, key: str) -> bool:
        return self._matching.includes(key)

    def _miss(self, name: str, item: str) -> None:
        key = f"{self._unit.key}.{GROUPS}.{name}.{item}"
        if self._includes(key):
            self._matching.miss(key, "a hyperparameter")

    def _value(self, key: str, item: str, current: Any) -> Any:
        """Return the saved value, or the tensor to be filled if a tensor was saved: the present one if it fits."""
        source = self._matching.source_of(key)
        if source is None:
            value = self._matching.saved.values[key]
            if not any(True for _ in references_in(value)):
                return value
            path = (*self._unit.path, key.removeprefix(f"{self._unit.key}."))
            return StoredContents(path, current, self._matching, fixed=False, device=None)
        saved = self._matching.saved.tensors[source]
        form = saved.torch_dtype, saved.shape
        if isinstance(current, torch.Tensor) and (current.dtype, tuple(current.shape)) == form:
            self._matching.take_tensor([key], current)
            return current
        return self._matching.make_tensor(key, current.device if isinstance(current, torch.Tensor) else None)

    def _agree(self, key: str, other: str | None) -> bool:
        if other is None:
            return False
        values = self._matching.saved.values
        if key not in values or other not in values:  # tensors: a copy for each parameter, or one for all
            return key not in values and other not in values
        return type(values[key]) is type(values[other]) and bool(values[key] == values[other])

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
