"""Loading of an optimizer: memory for its state is filled, and it receives a `state_dict` with its own numbers.

Nothing steps. State that the optimizer does not have yet is made as the checkpoint has it, and placed as the parameter
is; `load_state_dict` takes it in.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from ckptstore.errors import InvalidState, StateMismatch
from ckptstore.runtime.torch_private import has_state_dict_hooks
from ckptstore.state.index.part import Tensor
from ckptstore.state.live.alike import alike
from ckptstore.state.live.contents import StoredContents
from ckptstore.state.live.flatten import Unit, children, find_tensors, map_tensors, with_items
from ckptstore.state.live.matching import Matching
from ckptstore.state.live.modules import blaming
from ckptstore.state.live.optimizers import (
    GROUPS,
    MORE,
    STATE,
    STATE_OF_ALL,
    Hyperparameters,
    Scope,
    numbered,
    parameters_of,
    partition_of,
    split_name,
)
from ckptstore.state.live.values import ATOMS
from ckptstore.state.tensors.placement import PLAIN_TYPES, is_dtensor, name_of, pieces_of
from ckptstore.state.tensors.wrapped import Wrapped, key_of_part, unwrap

WHOLE = ""
"""In place of the name of an item: the state of a parameter in one piece."""


class OptimizerLoad:
    """One optimizer of the state, whose parameters `scope` names.

    A parameter of which the checkpoint has settings gets exactly the state that it has there, also none, as with
    `load_state_dict`. One that the checkpoint does not know keeps its state.
    """

    def __init__(self, unit: Unit, scope: Scope, matching: Matching) -> None:
        self._unit = unit
        self._optimizer: torch.optim.Optimizer = unit.item
        self._matching = matching
        scope = scope.fitting(unit.key, matching)
        self._part = partition_of(self._optimizer)
        self._hyperparameters = Hyperparameters(unit, scope, matching)
        self._names = {id(item): scope.of(item)[0] for item in parameters_of(self._optimizer)}
        owned = {self._names[id(item)] for item in parameters_of(self._part)}
        self._saved = self._saved_items(owned)
        self._shared: dict[Any, torch.Tensor] = {}
        self._state = {number: self._match_state(parameter) for number, parameter in numbered(self._part).items()}
        self._of_all = None if self._had_none_of_all() else self._contents_of(STATE_OF_ALL, self._global_state())
        self._more = self._contents_of(MORE, None) if self._takes_more() else None

    def finish(self) -> None:
        """Pass the optimizer its state, once the tensors have been filled. Raises StateMismatch when it refuses it."""
        parameters = numbered(self._part)
        state = {
            number: {
                item: self._as_made(parameters[number], held.result() if isinstance(held, StoredContents) else held)
                for item, held in items.items()
            }
            for number, items in self._state.items()
        }
        wanted = {number: items.get(WHOLE, items) for number, items in state.items() if items}
        more = _result(self._more, {})
        of_all = _result(self._of_all, {} if self._had_none_of_all() else self._global_state())
        passed = wanted if self._takes_more() else {number: _castable(items) for number, items in wanted.items()}
        packed = {STATE: {**passed, **of_all}, GROUPS: self._packed_groups(), **more}
        what = f"the {type(self._optimizer).__name__} at {self._unit.key!r}"
        with _same_groups(self._part), blaming(what, StateMismatch, did="refused its state"):
            self._part.load_state_dict(packed)
        self._restore_exactly(wanted)
        for optimizer in {id(item): item for item in (self._optimizer, self._part)}.values():
            self._hyperparameters.apply(optimizer)

    def _as_made(self, parameter: torch.Tensor, value: Any) -> Any:
        """Return the value with tensors as the optimizer makes them."""
        # LBFGS computes all of its state from all parameters at once. From DTensors it makes DTensors that every rank
        # has whole, also of single numbers and of the tensors in its lists.
        if not isinstance(self._part, torch.optim.LBFGS) or not is_dtensor(parameter):
            return value
        from torch.distributed.tensor import DTensor, Replicate

        mesh = parameter.device_mesh

        def whole(_key: str, leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor) or is_dtensor(leaf):
                return leaf
            return DTensor.from_local(leaf, mesh, [Replicate()] * mesh.ndim, run_check=False)

        return map_tensors(value, (), whole)

    def _key(self, name: str) -> str:
        return f"{self._unit.key}.{name}"

    def _saved_items(self, names: set[str]) -> dict[str, list[str]]:
        """Return the items of state that the checkpoint has of each parameter; the outermost names of nested ones.

        A key of a tensor inside a value is not an item.
        """
        found: dict[str, dict[str, None]] = {}
        known, values = {*names, *self._names.values()}, self._matching.saved.values
        prefix = self._key("")
        for key in self._matching.below(self._key(STATE)):
            split = split_name(key.removeprefix(prefix), known)
            if split is None:
                continue
            _, name, item = split
            if name not in names:  # another rank's, of an optimizer whose state is divided
                self._matching.placed(key)
                continue
            whole = self._key(f"{STATE}.{name}")
            first = item.split(".", 1)[0].split("@", 1)[0]
            found.setdefault(name, {})[WHOLE if whole in values else first] = None
        return {name: list(items) for name, items in found.items()}

    def _match_state(self, parameter: torch.Tensor) -> dict[Any, Any]:
        """Return the new content of each item of a parameter's state: a tensor, a value, or contents that are
        filled."""
        name, matching = self._names[id(parameter)], self._matching
        present = self._part.state.get(parameter, {})
        live = dict(present) if isinstance(present, Mapping) else {WHOLE: present}
        items = self._saved.get(name, [])
        if not items and name not in self._hyperparameters.known:
            for item, value in live.items():
                if matching.includes(key := self._key(_name_of(name, item))):
                    matching.miss(key, "a tensor" if isinstance(value, torch.Tensor) else "a plain value")
            return live
        if name in self._hyperparameters.foreign:  # of another kind of optimizer, as the settings that lack show
            return live
        if torch.nn.parameter.is_lazy(parameter):  # the module's key is refused for it
            return live
        if items == [WHOLE]:
            key = self._key(f"{STATE}.{name}")
            if not matching.includes_below(key) or key in matching.saved.skipped:
                return live
            whole = self._match_item(parameter, name, WHOLE, {WHOLE: present})
            return live if isinstance(whole, StoredContents) and not whole.changes else {WHOLE: whole}
        if isinstance(self._part, torch.optim.Adafactor) and "variance" in items and parameter.dim() > 1:
            matching.mismatch.differing[self._key(f"{STATE}.{name}.variance")] = (
                "is of flat pieces of a parameter, as FSDP1 shows them to Adafactor, which keeps rows and columns "
                "of a whole one"
            )
        items = sorted(items, key=lambda item: item != "step")  # torch's order, for those who print it
        keys = {item: self._key(_name_of(name, item)) for item in {*live, *items}}
        stays = {
            item for item, key in keys.items() if not matching.includes_below(key) or key in matching.saved.skipped
        }
        return {
            **{item: value for item, value in live.items() if item in stays},
            **{item: self._match_item(parameter, name, item, live) for item in items if item not in stays},
        }

    def _match_item(self, parameter: torch.Tensor, name: str, item: str, live: Mapping[str, Any]) -> Any:
        """Return the new content of one item; the present one if the checkpoint's does not fit, which is noted."""
        matching, key, current = self._matching, self._key(_name_of(name, item)), live.get(item)
        value, source = matching.saved.values.get(key), matching.source_of(key)
        is_wrapped = isinstance(value, Wrapped) or bool(matching.parts_of(key))
        if isinstance(current, torch.Tensor) and (is_wrapped or source is not None):
            matching.take_tensor([key], current)
            return current
        if is_wrapped or source is not None:
            if source is not None:
                saved = matching.saved.tensors[source]
                if matching.may_cast and saved.torch_dtype.is_floating_point and parameter.is_floating_point():
                    saved = saved._replace(dtype=saved.dtype if item == "step" else name_of(parameter.dtype))
                made = _made(parameter, item, saved, self._steps_on_device(parameter))
                if type(made) is torch.Tensor:  # one tensor of several parameters is one again
                    made = self._shared.setdefault((source, made.dtype, made.device), made)
            else:
                try:
                    made = _made_wrapper(matching, key, parameter, type(self._part))
                except StateMismatch as error:
                    matching.refuse(key, error)
                    return current
            matching.take_tensor([key], made)
            return made
        if item == "step" and isinstance(current, torch.Tensor) and isinstance(value, int | float):
            matching.placed(key)  # older releases of torch count in numbers
            return torch.full_like(current, value)
        if key not in matching.saved.values and not isinstance(current, Mapping):
            return self._nested(parameter, key)
        held = current if any(True for _ in children(current)) else None
        return self._contents_of(_name_of(name, item), held, device=parameter.device)

    def _nested(self, parameter: torch.Tensor, key: str) -> Any:
        """Return nested dicts as stock DCP flattens them; only the text of their keys is known."""
        found: dict[str, Any] = {}
        for inner in self._matching.below(key):
            *path, last = inner.removeprefix(f"{key}.").split(".")
            at = found
            for part in path:
                at = at.setdefault(part, {})
            if self._matching.source_of(inner) is not None:
                at[last] = self._matching.make_tensor(inner, parameter.device)
            else:
                self._matching.placed(inner)
                at[last] = self._matching.saved.values[inner]
        return found

    def _steps_on_device(self, parameter: torch.Tensor) -> bool:
        """Return True if torch keeps the count of steps on the parameter's device, and not on the host."""
        if isinstance(self._part, torch.optim.ASGD):
            return True
        for number, group in enumerate(self._part.param_groups):
            if any(item is parameter for item in group["params"]):
                settings = {**group, **self._hyperparameters.plain(number)}
                return bool(settings.get("capturable") or settings.get("fused"))
        return False

    def _contents_of(self, name: str, current: Any, *, device: torch.device | None = None) -> StoredContents | None:
        """Return the contents that are filled under a key, None if neither side has anything."""
        key = self._key(name)
        if not current and key not in self._matching.saved.values and not self._matching.below(key):
            return None
        return StoredContents((*self._unit.path, name), current, self._matching, fixed=False, device=device)

    def _global_state(self) -> dict[Any, Any]:
        state: Mapping[Any, Any] = self._part.state
        return {item: value for item, value in state.items() if not isinstance(item, torch.Tensor)}

    def _had_none_of_all(self) -> bool:
        """Return True if the optimizer was saved without state that belongs to no parameter: then it has none again."""
        key, matching = self._key(STATE_OF_ALL), self._matching
        is_stored = key in matching.saved.values or bool(matching.below(key))
        return bool(self._hyperparameters.known) and not is_stored and matching.includes(key)

    def _takes_more(self) -> bool:
        """Return True if the optimizer may use further entries of the state dict; torch's own code ignores them."""
        kind, plain = type(self._part), torch.optim.Optimizer
        is_own = kind.load_state_dict is not plain.load_state_dict or kind.state_dict is not plain.state_dict
        return is_own or has_state_dict_hooks(self._part)

    def _packed_groups(self) -> list[dict[str, Any]]:
        numbers = {id(parameter): number for number, parameter in numbered(self._part).items()}
        return [
            self._hyperparameters.packed(number, group, [numbers[id(item)] for item in group["params"]])
            for number, group in enumerate(self._part.param_groups)
        ]

    def _restore_exactly(self, wanted: Mapping[int, Any]) -> None:
        """Undo the changes of `load_state_dict` beyond setting: it casts state to its parameter's dtype, moves it, and
        spoils what it cannot cast."""
        for number, parameter in numbered(self._part).items():
            if number not in wanted or parameter not in self._part.state:
                continue
            present, ours = self._part.state[parameter], wanted[number]
            if isinstance(present, MutableMapping) and isinstance(ours, Mapping):
                for item, value in ours.items():
                    if not _agrees(present.get(item), value):
                        present[item] = value
            elif not isinstance(present, Mapping) and not _agrees(present, ours):
                self._part.state[parameter] = ours


@contextmanager
def _same_groups(optimizer: Any) -> Iterator[None]:
    """Keep the caller's own dicts as the groups of an optimizer, and of one that it wraps, which shares them, with the
    loaded settings: `load_state_dict` makes new ones."""
    holders = [optimizer, getattr(optimizer, "optim", None), getattr(optimizer, "optimizer", None)]
    every = [item for item in holders if isinstance(item, torch.optim.Optimizer)]
    before = [(holder, holder.param_groups, list(holder.param_groups)) for holder in every]
    yield
    for holder, groups, held in before:
        for own, new in zip(held, list(holder.param_groups), strict=True):
            if own is not new:
                contents = dict(new)
                own.clear()
                own.update(contents)
        groups[:] = held
        if holder.param_groups is not groups:
            holder.param_groups = groups


def _result(contents: StoredContents | None, other: Any) -> Any:
    return contents.result() if contents is not None and contents.changes else other


def _made(parameter: torch.Tensor, item: str, saved: Tensor, steps_on_device: bool) -> torch.Tensor:
    """Return memory for a tensor of state that the optimizer does not have yet, on the device where it would make it:
    with the parameter, and divided over the ranks as that is. Counts of steps are whole, and on the host unless the
    device keeps them."""
    if item == "step" or not saved.shape:
        device = parameter.device if steps_on_device or item != "step" else "cpu"
        return torch.empty(saved.shape, dtype=saved.torch_dtype, device=device)
    parameter = parameter.detach()
    if is_dtensor(parameter):
        if saved.shape == tuple(parameter.shape):
            return torch.empty_like(parameter, dtype=saved.torch_dtype)
        from torch.distributed.tensor import Replicate, empty

        mesh = parameter.device_mesh
        made: torch.Tensor = empty(
            *saved.shape, dtype=saved.torch_dtype, device_mesh=mesh, placements=[Replicate()] * mesh.ndim
        )
        return made
    if saved.shape == tuple(parameter.shape) and type(parameter) in PLAIN_TYPES:
        return torch.empty_like(parameter, dtype=saved.torch_dtype)
    return torch.empty(saved.shape, dtype=saved.torch_dtype, device=parameter.device)


def _name_of(parameter: str, item: str) -> str:
    """Return the name of an item of a parameter's state, or of all of it."""
    return f"{STATE}.{parameter}" if item == WHOLE else f"{STATE}.{parameter}.{item}"


def _castable(value: Any) -> Any:
    """Return the value with None in the place of everything that may not survive torch's cast of state, which calls the
    class of what can be iterated with a generator: numpy arrays raise. `_restore_exactly` sets it."""
    if _is_uncastable(value):
        return None
    parts = ((part, item) for part, item in children(value) if type(item) not in ATOMS)
    changed = {part: new for part, item in parts if (new := _castable(item)) is not item}
    return with_items(value, changed) if changed else value


def _is_uncastable(value: Any) -> bool:
    is_known = isinstance(value, torch.Tensor | Mapping | str | bytes | bytearray) or type(value) in (list, tuple)
    return isinstance(value, Iterable) and not is_known


def _agrees(present: Any, ours: Any) -> bool:
    if isinstance(ours, torch.Tensor):
        same = isinstance(present, torch.Tensor) and type(present) is type(ours)
        return same and (present.dtype, present.device) == (ours.dtype, ours.device)
    if any(True for _ in find_tensors(ours, ())):
        return False
    return alike(present, ours) or not _is_cast(present, ours)


def _is_cast(present: Any, ours: Any) -> bool:
    """Return True for what torch's cast makes of a value without tensors: a text is then that of a generator. Anything
    else is the optimizer's own doing."""
    if _is_uncastable(ours):
        return present is None
    if isinstance(ours, str):
        return isinstance(present, str) and (present == ours or present.startswith("<generator object "))
    if isinstance(ours, Mapping | list | tuple):
        pairs = [*children(ours)], [*children(present)]
        return [part for part, _ in pairs[0]] == [part for part, _ in pairs[1]] and all(
            _is_cast(new, old) for (_, old), (_, new) in zip(*pairs, strict=True)
        )
    return alike(present, ours)


def _made_wrapper(matching: Matching, key: str, parameter: torch.Tensor, optimizer: type) -> torch.Tensor:
    """Return a wrapper tensor like the one that was saved under a key, for a parameter's state, to be filled.

    Its class must be in the module of the optimizer's class, or of one that this inherits from: a checkpoint chooses
    none. Raises StateMismatch when it is not, or cannot be made from the saved one.
    """
    if not is_dtensor(parameter):
        return _made_as(matching, key, _saved(matching, key, key, parameter.shape), parameter.device, optimizer)
    found = {}
    for piece in pieces_of(parameter, key):
        name = key_of_part(key, piece.box.offsets)
        saved = _saved(matching, key, name, piece.box.sizes)
        found[name] = _made_as(matching, name, saved, parameter.device, optimizer)
    if len(found) != 1:
        raise StateMismatch(f"{key} wraps tensors, and this rank has no one part of it", hint=_HINT)
    from torch.distributed.tensor import DTensor

    (local,) = found.values()
    return DTensor.from_local(
        local, parameter.device_mesh, parameter.placements, shape=parameter.shape, stride=parameter.stride()
    )


_HINT = "Let the optimizer step once before loading"
_NAMED = ("torch.dtype", "torch.layout", "torch.memory_format")
"""Kinds of plain values that are attributes of torch, by their names."""


def _saved(matching: Matching, key: str, name: str, shape: Sequence[int]) -> Wrapped:
    saved = matching.saved.values.get(name)
    if not isinstance(saved, Wrapped) or saved.label.shape != tuple(shape):
        raise StateMismatch(f"{key} was saved in other parts than those of the state", hint=_HINT)
    return saved


def _made_as(matching: Matching, key: str, saved: Wrapped, device: torch.device, optimizer: type) -> torch.Tensor:
    label = saved.label
    named = [
        vars(sys.modules[kind.__module__]).values() for kind in optimizer.__mro__ if kind.__module__ in sys.modules
    ]
    classes = {f"{item.__module__}.{item.__qualname__}": item for items in named for item in items if _is_tensor(item)}
    kind: Any = classes.get(label.kind)
    if kind is None or not hasattr(kind, "__tensor_unflatten__"):
        raise StateMismatch(f"{key} is a {label.kind}, and the optimizer has no state to load it into", hint=_HINT)
    inner = {name: _inner(matching, f"{key}.{name}", item, device, optimizer) for name, item in saved.items()}
    stride = torch.empty(label.shape, device="meta").stride()
    try:
        made: torch.Tensor = kind.__tensor_unflatten__(
            inner, _decoded(json.loads(label.context)), torch.Size(label.shape), stride
        )
        same = replace(unwrap(made, key).label, part=label.part) == label
    except Exception as error:  # the class is the user's, and so are its errors
        raise StateMismatch(f"{key} cannot be made from what was saved: {error}", hint=_HINT) from error
    if not same:
        raise StateMismatch(f"{key} cannot be made from what was saved", hint=_HINT)
    return made


def _is_tensor(item: Any) -> bool:
    return isinstance(item, type) and issubclass(item, torch.Tensor)


def _inner(matching: Matching, key: str, saved: Any, device: torch.device, optimizer: type) -> torch.Tensor:
    if isinstance(saved, Wrapped):
        return _made_as(matching, key, saved, device, optimizer)
    entry = matching.saved.tensors[matching.saved.aliases.get(saved.key, saved.key)]
    return torch.empty(entry.shape, dtype=entry.torch_dtype, device=device)


def _decoded(item: Any) -> Any:
    """Return the argument of `__tensor_unflatten__` beside the inner tensors, from the JSON that describes it."""
    if isinstance(item, list):
        return tuple(map(_decoded, item))  # mostly shapes, which torch takes as tuples
    if not isinstance(item, dict):
        return item
    if not any("." in name for name in item):
        return {name: _decoded(value) for name, value in item.items()}
    ((kind, value),) = item.items()
    if kind == "builtins.float":
        return float.fromhex(value)
    named = getattr(torch, value.removeprefix("torch."), None) if kind in _NAMED else None
    if named is None or f"torch.{type(named).__name__}" != kind:
        raise InvalidState(f"it has a {kind} beside its tensors, which is no plain value")
    return named
