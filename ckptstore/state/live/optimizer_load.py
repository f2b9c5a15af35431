"""Loading of an optimizer: its state is created where it is missing, filled, and everything else set exactly."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

from ckptstore.state.live.hyperparameters import Hyperparameters
from ckptstore.state.live.matching import Matching
from ckptstore.state.live.modules import blaming, quiet_torch, uses_fsdp1
from ckptstore.state.live.optimizer_state import create_state, set_flat
from ckptstore.state.live.optimizers import (
    GROUPS,
    OPTIONS,
    STATE,
    Scope,
    as_it_is,
    parameters_of,
    read_optimizer,
    rename,
    split_name,
)
from ckptstore.state.live.units import Unit


class OptimizerLoad:
    """One optimizer of the state, whose parameters `scope` names.

    A parameter without state in the checkpoint has none afterwards, since it had not stepped when it was saved.
    """

    def __init__(self, unit: Unit, scope: Scope, matching: Matching) -> None:
        self._unit = unit
        self._optimizer: torch.optim.Optimizer = unit.item
        self._scope = scope
        self._matching = matching
        self._state_before = dict(self._optimizer.state)
        self._owners = {name: item for item in parameters_of(self._optimizer) for name in scope.of(item)}
        self._values: dict[str, Any] = {}
        self._is_wanted = matching.includes_below(unit.key)
        if self._is_wanted:
            self._prepare_state()
            self._flat = read_optimizer(unit.key, self._optimizer, scope)
            self._match_state()
            self._hyperparameters = Hyperparameters(unit.key, self._optimizer, scope, matching)

    def finish(self) -> None:
        """Put everything into its place, once the tensors have been filled. Collective under FSDP1."""
        if not self._is_wanted:
            return
        state = {id(parameter): dict(self._optimizer.state.get(parameter, {})) for parameter in self._parameters}
        self._flat.update(self._values)
        groups = self._hyperparameters.flat()
        is_copied = uses_fsdp1(self._scope.root)
        if groups:
            private = {rename(name, self._scope.private): item for name, item in {**self._flat, **groups}.items()}
            stateless = [item for item in self._parameters if item not in self._optimizer.state] if is_copied else []
            with (
                as_it_is(self._optimizer),
                _frozen(stateless),
                quiet_torch(),
                blaming(f"the optimizer at {self._unit.key!r}"),
            ):
                set_optimizer_state_dict(self._scope.root, self._optimizer, private, options=OPTIONS)
        if is_copied:
            self._drop_empty()
        else:
            self._restore_exactly(state)
        self._hyperparameters.apply()

    def abandon(self) -> None:
        """Take back what the preparation changed, for a load that does not happen."""
        if self._is_wanted:
            self._optimizer.state.clear()
            self._optimizer.state.update(self._state_before)

    @property
    def _parameters(self) -> list[torch.Tensor]:
        return parameters_of(self._optimizer)

    def _saved_names(self, section: str) -> set[str]:
        """The parameters of which the checkpoint has something in a section, as far as that was asked for."""
        prefix = f"{self._unit.key}."
        found = set()
        for key in self._matching.below(f"{self._unit.key}.{section}"):
            split = split_name(key.removeprefix(prefix), self._owners)
            if split is not None and self._matching.includes(key):
                found.add(split[1])
        return found

    def _prepare_state(self) -> None:
        with_state, with_settings = self._saved_names(STATE), self._saved_names(GROUPS)
        missing = []
        for parameter in self._parameters:
            names = self._scope.of(parameter)
            has_state = bool(self._optimizer.state.get(parameter))
            if any(name in with_state for name in names):
                missing += [] if has_state else [parameter]
            elif has_state and all(name in with_settings for name in names):
                del self._optimizer.state[parameter]
        if missing:
            try:
                create_state(self._unit.key, self._optimizer, missing)
            except BaseException:
                self.abandon()
                raise

    def _match_state(self) -> None:
        matching, saved = self._matching, self._matching.saved
        for name, item in self._flat.items():
            key = f"{self._unit.key}.{name}"
            if not name.startswith(f"{STATE}.") or not matching.includes(key):
                continue
            if isinstance(item, torch.Tensor):
                if item.dim() == 0 and _is_number(saved.values.get(key)):  # older releases of torch count in numbers
                    matching.placed(key)
                    self._values[name] = torch.full_like(item, saved.values[key])
                else:
                    matching.take_tensor([key], item)
            elif key in saved.values:
                matching.placed(key)
                self._values[name] = saved.values[key]
            else:
                matching.miss(key, "a plain value")

    def _restore_exactly(self, state: dict[int, dict[str, Any]]) -> None:
        """Undo what torch's setter does beyond setting: it casts state to the parameter's dtype, forgets that of frozen
        parameters and makes empty entries."""
        for name, value in self._values.items():
            split = split_name(name, self._owners)
            if split is not None:
                set_flat(state[id(self._owners[split[1]])], split[2], value)
        found = dict(self._optimizer.state)
        self._optimizer.state.clear()
        for parameter in self._parameters:
            wanted, present = state[id(parameter)], found.get(parameter, {})
            for name, item in wanted.items():
                if not isinstance(item, torch.Tensor) or not _agrees(present.get(name), item):
                    present[name] = item
            if wanted:
                self._optimizer.state[parameter] = present

    def _drop_empty(self) -> None:
        for parameter in self._parameters:
            if parameter in self._optimizer.state and not self._optimizer.state[parameter]:
                del self._optimizer.state[parameter]


@contextmanager
def _frozen(parameters: Sequence[torch.Tensor]) -> Iterator[None]:
    """Freeze parameters: for torch's setter those may be without state, while FSDP1's flat ones otherwise may not."""
    free = [parameter for parameter in parameters if parameter.requires_grad]
    for parameter in free:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in free:
            parameter.requires_grad_(True)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _agrees(present: Any, item: torch.Tensor) -> bool:
    return isinstance(present, torch.Tensor) and present.dtype == item.dtype and type(present) is type(item)
