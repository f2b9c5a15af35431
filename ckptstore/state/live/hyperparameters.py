"""Hyperparameters of an optimizer: stored for each parameter, set for each group, with exact types."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch

from ckptstore.state.live.matching import Matching
from ckptstore.state.live.optimizers import GROUPS, Scope, split_name

_ABSENT = object()


class Hyperparameters:
    """What the checkpoint has for the groups of one optimizer.

    A group gets everything that was saved for its parameters, also what it does not have now (a scheduler's
    `initial_lr`). What the optimizer's class fills in for checkpoints of older releases is filled in. All parameters of
    a group must have been saved with the same values.
    """

    def __init__(self, key: str, optimizer: torch.optim.Optimizer, scope: Scope, matching: Matching) -> None:
        self._key = key
        self._optimizer = optimizer
        self._matching = matching
        self._names = [
            [name for parameter in group["params"] for name in scope.of(parameter)] for group in optimizer.param_groups
        ]
        self._saved = self._saved_by_parameter()
        self._loaded = [self._match(number) for number in range(len(self._names))]

    def flat(self) -> dict[str, Any]:
        """All of them under flat names, as torch's setter wants them, loaded or not."""
        flat = {}
        for group, names, loaded in zip(self._optimizer.param_groups, self._names, self._loaded, strict=True):
            for item, value in {**group, **loaded}.items():
                if item != "params":
                    flat.update({f"{GROUPS}.{name}.{item}": value for name in names})
        return flat

    def apply(self) -> None:
        """Set what was loaded: the very objects, where torch's setter sets copies."""
        for group, loaded in zip(self._optimizer.param_groups, self._loaded, strict=True):
            group.update(loaded)

    def _saved_by_parameter(self) -> dict[str, dict[str, str]]:
        known = {name for names in self._names for name in names}
        saved: dict[str, dict[str, str]] = defaultdict(dict)
        for key in self._matching.below(f"{self._key}.{GROUPS}"):
            split = split_name(key.removeprefix(f"{self._key}."), known)
            if split is not None:
                self._matching.placed(key)
                if self._matching.includes(key):
                    saved[split[1]][split[2]] = key
        return saved

    def _match(self, number: int) -> dict[str, Any]:
        """What is loaded for one group."""
        group, names = self._optimizer.param_groups[number], self._names[number]
        if not names:
            return {}
        first = {item: self._value(key, group.get(item)) for item, key in self._saved.get(names[0], {}).items()}
        for name in names:
            saved = self._saved.get(name, {})
            for item in sorted((group.keys() | first.keys()) - {"params"}):
                key = f"{self._key}.{GROUPS}.{name}.{item}"
                if not self._matching.includes(key):
                    continue
                if item not in saved:
                    self._fill(number, item, key, first)
                elif name != names[0] and not self._agree(saved[item], self._saved.get(names[0], {}).get(item)):
                    self._matching.mismatch.differing[key] = (
                        f"is {self._matching.saved.values.get(saved[item])!r} in the checkpoint, and other parameters "
                        f"of the same group have another {item}"
                    )
        return first

    def _value(self, key: str, current: Any) -> Any:
        """The saved value; a tensor to be filled where a tensor was saved, the present one if it fits."""
        source = self._matching.source_of(key)
        if source is None:
            return self._matching.saved.values[key]
        saved = self._matching.saved.tensors[source]
        if isinstance(current, torch.Tensor) and (current.dtype, tuple(current.shape)) == (saved.dtype, saved.shape):
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

    def _fill(self, number: int, item: str, key: str, first: dict[str, Any]) -> None:
        filled = first.get(item, _ABSENT)
        if filled is _ABSENT:
            filled = _filled_in(self._optimizer, number, item)
            if filled is not _ABSENT and self._saved.get(self._names[number][0]):
                first[item] = filled
                return
        elif self._names[number][0] not in self._saved or item not in self._saved[self._names[number][0]]:
            return
        self._matching.miss(key, "a hyperparameter")


def _filled_in(optimizer: torch.optim.Optimizer, number: int, item: str) -> Any:
    """What the optimizer's class puts into a group that lacks an item, as it does for checkpoints of older releases."""
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
    except Exception:  # optimizers are the user's, and so is what they raise: then nothing is filled in
        return _ABSENT
    return probe.param_groups[0].get(item, _ABSENT)
