"""A state as flat keys for saving, and a checkpoint's contents back into a state.

Loading has two phases, so that bytes are read straight into the memory where they belong:

    flat = collect(state)                       # save: the tensors and values of this rank
    loading = begin_load(state, saved)          # load: the memory to fill, and everything that does not fit
    ... note in loading.mismatch the loading.conflicts that the checkpoint does not settle ...
    loading.mismatch.check(strict=True)         # of all ranks together: Mismatch.joined
    ... fill every loading.targets[key].tensor with the checkpoint's tensor .source ...
    loading.finish(fill)                        # modules, optimizers, schedulers, other objects, plain values
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ckptstore.errors import InvalidInput
from ckptstore.runtime.collector import collector_paused
from ckptstore.state.live.contents import load_stateful, load_value, pass_state
from ckptstore.state.live.flatten import FlatState, Kind, Unit, is_loader, units_of
from ckptstore.state.live.held import Fill, Held, Written
from ckptstore.state.live.loader_state import warn_of_order
from ckptstore.state.live.matching import Matching, Saved, Target
from ckptstore.state.live.module_load import Materialised, load_module
from ckptstore.state.live.modules import collect_module, same_on_all_ranks, uses_fsdp1
from ckptstore.state.live.optimizer_load import OptimizerLoad
from ckptstore.state.live.optimizers import collect_optimizer, scope_of
from ckptstore.state.tensors.cast_loss import check_load_cast
from ckptstore.state.tensors.overlap import Conflict, local_memory
from ckptstore.state.tensors.placement import PLAIN_TYPES, dtype_and_shape, name_of
from ckptstore.state.tensors.tensor_memory import check_memory, outside_inference


@collector_paused()
@outside_inference()
def collect(state: Mapping[str, Any]) -> FlatState:
    """Return everything that this rank has to store, under the keys that stock DCP would use.

    Training is not changed: parameters, gradients, optimizer state and random numbers stay as they are, and an
    optimizer that has not stepped is stored without state. Collective if FSDP1 is in the state. Raises InvalidState
    with the key for anything that cannot be stored.
    """
    units = units_of(state)
    modules = _modules(units)
    same = same_on_all_ranks(unit.item for unit in units if unit.kind is Kind.MODULE and not unit.is_own)
    flat = FlatState()
    for unit in units:
        known = set(flat.paths) if unit.is_own else set()
        if unit.kind is Kind.MODULE:
            collect_module(flat, unit.typed_path, unit.item, same)
        elif unit.kind is Kind.OPTIMIZER:
            flat.optimizers.add(unit.key)
            scope = scope_of(unit.key, unit.item, modules)
            if uses_fsdp1(scope.root):
                from ckptstore.state.live.optimizer_fsdp1 import collect_fsdp1_optimizer as collect_one
            else:
                collect_one = collect_optimizer
            collect_one(flat, unit.typed_path, unit.item, scope, same)
        elif unit.kind is Kind.VALUE:
            flat.add_value(unit.typed_path, unit.item)
        else:
            contents = unit.item.state_dict()
            if unit.kind is Kind.STATEFUL and is_loader(unit.item):
                warn_of_order(unit.key, unit.item, contents)
            flat.add_value(unit.typed_path, contents)
        if unit.is_own:
            flat.own |= flat.paths.keys() - known
    return flat


class Loading:
    """A load between its two phases. Made by `begin_load`.

    `targets` has the memory to be filled, each once: the state's own, except under FSDP1 and for tensors that the state
    does not have yet. `conflicts` has the pairs of stored tensors that are for the same memory, and must be found equal
    before. `mismatch` has everything that does not fit. `materialised` has the results for modules that were on the
    meta device.
    """

    def __init__(self, matching: Matching) -> None:
        self.targets: Mapping[str, Target] = matching.targets
        self.conflicts: Sequence[Conflict] = ()
        self.mismatch = matching.mismatch
        self._translated = matching.translated
        self.lacking = matching.lacking
        self.materialised: list[Materialised] = []
        self._casts = matching.casts
        self._finishes: list[tuple[Unit, Callable[[], None]]] = []

    def begin(self, units: Sequence[Unit], matching: Matching, device: torch.device | None) -> None:
        """Match the units of a state, and those that are there already with what the checkpoint has for them."""
        modules = _modules(units)
        for unit in sorted(units, key=lambda unit: unit.kind):  # stable: the caller's order within a kind
            if type(unit.item) in PLAIN_TYPES and not unit.item.is_meta:
                matching.take_tensor([unit.key], unit.item)
                finish = _done  # once it is filled
            elif unit.kind is Kind.MODULE:
                materialised, finish = load_module(unit, matching, device=device)
                matching.take_state_dict(unit.key)
                self.materialised.append(materialised)
            elif unit.kind is Kind.OPTIMIZER and unit.key not in matching.saved.values:
                finish = _optimizer_load(unit, modules, matching)
            elif unit.kind is Kind.VALUE:
                finish = load_value(unit, matching, device=device)
            else:  # also an optimizer whose state dict was not torch's, and was saved as a whole
                finish = load_stateful(unit, matching, device=device)
            self._finishes.append((unit, finish))
        keys = {id(target.tensor): key for key, target in self.targets.items()} if self._casts else {}
        for tensor, filled in self._casts:
            for part in local_memory(tensor):
                if not part.is_meta:  # as in a check of a load
                    check_memory(part, keys[id(filled)])

    @property
    def casts(self) -> dict[str, str]:
        """The dtypes, in words, of tensors that are cast, by key."""
        return {
            key: f"{name_of(dtype_and_shape(self.targets[key].tensor)[0])} to {name_of(dtype)}"
            for key, dtype in sorted(self.cast_to.items())
        }

    @property
    def cast_to(self) -> Mapping[str, torch.dtype]:
        """The dtypes of the state, by key, of tensors that were saved in another one."""
        dtypes = {id(filled): tensor.dtype for tensor, filled in self._casts}
        return {key: dtypes[id(it.tensor)] for key, it in self.targets.items() if id(it.tensor) in dtypes}

    def divided(self) -> tuple[Mapping[str, Target], Mapping[str, Target]]:
        """Return the targets that are separate memory, of which the state gets a cast, and all others."""
        cast_to = self.cast_to
        parts: tuple[dict[str, Target], dict[str, Target]] = ({}, {})
        for key, target in self.targets.items():
            parts[key not in cast_to][key] = target
        return parts

    def check_casts(self) -> None:
        """Raise StateMismatch, with the key, if the state cannot hold a number of a tensor that is cast. Call it once
        the targets of casts are filled."""
        for key, dtype in self.cast_to.items():
            check_load_cast(key, self.targets[key].tensor, dtype)

    @outside_inference()
    def finish(self, fill: Fill, states_of_all_ranks: Mapping[str, Any] | None = None) -> Written:
        """Set everything that is not a tensor, and pass modules, optimizers, schedulers and other objects their state,
        in this order; plain values last. Call it once all targets are filled. Collective under FSDP1.

        What the code of an object writes over on the way is put back, for which `fill` reads targets once more: return
        what that was. `states_of_all_ranks` has the argument of `load_rank_states` for objects that get it besides.
        """
        with torch.inference_mode():  # in which all tensors may be written to, inference tensors too
            for tensor, filled in self._casts:
                tensor.copy_(filled)
        held = Held([unit for unit, _ in self._finishes], self.targets, self._casts, self._translated)
        values = [(unit, finish) for unit, finish in self._finishes if unit.kind is Kind.VALUE]
        others = [(unit, finish) for unit, finish in self._finishes if unit.kind is not Kind.VALUE]
        for unit, _ in values:
            held.hold(unit)
        for unit, finish in others:
            held.finish(unit, finish)
        for unit, _ in others:
            if states := (states_of_all_ranks or {}).get(unit.key):
                pass_state(unit, unit.item.load_rank_states, states)
        written = held.restore(fill)
        for _, finish in values:
            finish()
        self._casts.clear()
        return written

    def abandon(self) -> None:
        """Restore the state as it was before `begin_load`, for a load that is not carried out."""
        self._casts.clear()
        for materialised in reversed(self.materialised):
            materialised.release()


@collector_paused()
@outside_inference()
def begin_load(
    state: Mapping[str, Any],
    saved: Saved,
    *,
    include: str | Sequence[str] | None = None,
    device: torch.device | str | None = None,
    casts: bool = False,
) -> Loading:
    """Find the place of everything that is to be loaded. The caller has to check the mismatch.

    Only the parts that the state names are loaded; keys that the checkpoint has below those names and that find no
    place are unexpected. `include` narrows it to keys that fit a pattern (fnmatch: `"model.*"`, or several). Optimizer
    state that is missing is created. Modules on the meta device get memory on `device` (None: that of their mesh, else
    torch's default, else the CPU); tensors that the state lacks are made on `device` (None: the CPU). None is made as
    an inference tensor, whatever mode the caller is in. With `casts` a floating-point tensor that was saved in another
    floating-point dtype is cast, through separate memory. Collective if FSDP1 is in the state.

    Raises InvalidState for a state that cannot be loaded into at all, and StateMismatch when an optimizer cannot create
    its state; the state is then as it was.
    """
    units = units_of(state)
    matching = Matching(saved, include=include, casts=casts)
    loading = Loading(matching)
    try:
        loading.begin(units, matching, _device_of(device))
    except BaseException:
        loading.abandon()
        raise
    loading.conflicts = matching.close(state)
    return loading


def _device_of(device: Any) -> torch.device | None:
    try:
        return None if device is None else torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise InvalidInput(
            f"device is {device!r}, it is one that torch has here: {str(error).splitlines()[0]}"
        ) from None


def _optimizer_load(
    unit: Unit, modules: Sequence[tuple[str, torch.nn.Module]], matching: Matching
) -> Callable[[], None]:
    scope = scope_of(unit.key, unit.item, modules)
    if not matching.includes_below(unit.key):
        return _done
    if not uses_fsdp1(scope.root):
        return OptimizerLoad(unit, scope, matching).finish
    from ckptstore.state.live.optimizer_fsdp1 import Fsdp1OptimizerLoad

    return Fsdp1OptimizerLoad(unit, scope, matching).finish


def _done() -> None:
    """Do nothing: there is nothing to finish."""


def _modules(units: Sequence[Unit]) -> list[tuple[str, torch.nn.Module]]:
    return [(unit.key, unit.item) for unit in units if unit.kind is Kind.MODULE]
