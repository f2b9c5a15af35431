"""A nested state under flat keys: its tensors, its plain values, and their keys.

Keys are those of torch's DCP: the parts of the path joined by dots, list positions as numbers. So stock DCP looks for
the same keys when it flattens a state dict. The paths are kept, because a key alone does not distinguish `{"a.b": 1}`
from `{"a": {"b": 1}}`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from operator import is_
from typing import Any, NamedTuple

import torch
from torch.optim.lr_scheduler import LRScheduler

from ckptstore.errors import InvalidState
from ckptstore.state.index.key_paths import DictKey, typed
from ckptstore.state.index.key_paths import Path as TypedPath
from ckptstore.state.index.packed_values import is_plain
from ckptstore.state.live.accelerated import check_has_position, is_prepared_loader
from ckptstore.state.live.values import ATOMS, check_in_sight, check_key
from ckptstore.state.tensors.dense import Dense, dense_of
from ckptstore.state.tensors.overlap import identity_of
from ckptstore.state.tensors.placement import PLAIN_TYPES, is_wrapped, wrapped_in
from ckptstore.state.tensors.tensor_memory import obstacle_of
from ckptstore.state.tensors.wrapped import Wrapped

Path = tuple[Any, ...]
"""The keys and list positions that lead to a value, as they are in the state."""

_IN_A_LEAF = ATOMS | {tuple}
"""Types of items for which stock DCP does not take a list apart."""


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A placeholder, in a plain value that was read from a checkpoint, for the tensor that is stored under `key`."""

    key: str


@dataclass(frozen=True, slots=True)
class Replicated:
    """A tensor that the caller marked as the same on all ranks. Made by `replicated`."""

    tensor: torch.Tensor


_TENSORS = (torch.Tensor, Replicated)


def replicated(tensor: torch.Tensor) -> Replicated:
    """Mark a plain tensor as the same on all ranks, so that each rank writes a part, in place of one rank all.

    The first save of a store compares all bytes between the ranks, and so does every `compare_every`-th one after it:
    if they differ, the save raises InvalidState, with the ranks, before anything is written. Saves in between do not
    compare, and if ranks differ then, the checkpoint holds a part of each. Parameters under DDP and DTensors with a
    Replicate placement need no mark. Use it at the tensor's place in the state, for saving and for loading.
    """
    return Replicated(tensor)


@dataclass(frozen=True, slots=True)
class OwnOfRank:
    """An object or value that the caller marked as each rank's own. Made by `per_rank`."""

    item: Any


def per_rank(item: Any) -> OwnOfRank:
    """Mark an object, a tensor or a plain value as each rank's own, even if all ranks happen to have the same. The
    position of a data loader is such a value: it means other samples on other ranks. So are the weights of a module
    that ranks train apart for a while, under DDP too, and those of its optimizer: mark both.

    Each rank stores its own and loads it again. On another number of ranks a load is refused unless its `per_rank=`
    says how to treat it. Use the mark at the item's place in the state, for saving and for loading. A tensor or plain
    value stays marked there, and is read as `.item`. Anything tied to marked tensors is each rank's own as well.
    Tensors that are distributed over ranks (DTensor, FSDP) raise InvalidState: no rank has all of them.
    """
    return OwnOfRank(item)


class TensorEntry(NamedTuple):
    """One tensor that this rank holds, whole or in part.

    `tensor` is a plain tensor, a DTensor or FSDP1's ShardedTensor: the live memory, not a copy, except for FSDP1.
    `replicated` is True if it is known to be the same on all ranks. `lowest_rank_counts` is True if other ranks may
    hold other numbers without harm: DDP sends rank 0's buffers to all before each forward pass, so the
    lowest rank's are the ones to store, whole.
    """

    tensor: torch.Tensor
    replicated: bool = False
    lowest_rank_counts: bool = False


@dataclass(slots=True)
class FlatState:
    """The tensors and values that a rank has to store. Refers to live objects: encode the values and copy the tensors
    before training goes on.

    `tensors` has each memory once, under the first key that leads to it; `aliases` leads from every further key (tied
    weights) to that one. `values` has everything that is not a tensor, unchanged; tensors inside such a value are in
    `tensors` too, and `key_of` names them. `paths` has the path of every key of the three, as DCP would flatten it.
    """

    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    paths: dict[str, tuple[str | int, ...]] = field(default_factory=dict)
    typed: dict[str, TypedPath] = field(default_factory=dict)
    """The paths with keys of dicts that are no text, by key, where `paths` has these as text."""
    own: set[str] = field(default_factory=set)
    """The keys that each rank has of its own, even if the ranks do not differ."""
    optimizers: set[str] = field(default_factory=set)
    """The keys of the optimizers."""
    modules: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    """The metadata of each module that has any: what it and those inside it have noted beside their items, as their
    versions, by canonical name."""
    dense: dict[str, Dense] = field(default_factory=dict)
    """The memory of those of `tensors` that are dense."""
    _keys_by_identity: dict[Hashable, str] = field(default_factory=dict)
    _kept: list[torch.Tensor] = field(default_factory=list)

    def add_tensor(self, path: Path, entry: TensorEntry, *, live: torch.Tensor | None = None) -> None:
        """Take in a tensor. `live` is the parameter or buffer that it shows, if that is another object.

        A tensor that wraps others becomes a value, and its inner tensors become separate tensors. Raises InvalidState,
        with the key, for a kind of tensor that cannot be stored.
        """
        key = self._take(path)
        if live is None and (dense := dense_of(entry.tensor)) is not None:
            tensor = entry.tensor
            first = self._keys_by_identity.setdefault(_identity_of_dense(tensor, dense), key)
            if first != key:
                self.aliases[key] = first
            else:
                self.tensors[key], self.dense[key] = entry, dense
            self._keys_by_identity.setdefault(id(tensor), first)
            self._kept.append(tensor)
            return
        obstacle = obstacle_of(entry.tensor)
        if obstacle is not None:
            raise InvalidState(f"{key} is {obstacle[0]}, which cannot be stored", hint=obstacle[1])
        kept = entry.tensor if live is None else live
        if is_wrapped(entry.tensor):
            for name, value in wrapped_in(entry.tensor, key).items():
                self._add_wrapped((*path[:-1], f"{path[-1]}{name.removeprefix(key)}"), value, entry, is_new=name != key)
            self._keys_by_identity[id(kept)] = self._keys_by_identity[id(entry.tensor)] = key
            self._kept += [kept, entry.tensor]
            return
        dense = dense_of(kept)
        identity = identity_of(kept) if dense is None else _identity_of_dense(kept, dense)
        first = self._keys_by_identity.setdefault(identity, key)
        if first != key:
            self.aliases[key] = first
        else:
            self.tensors[key] = entry
        self._keys_by_identity.setdefault(id(entry.tensor), first)
        self._kept += [kept, entry.tensor]

    def _add_wrapped(self, path: Path, value: Wrapped, entry: TensorEntry, *, is_new: bool) -> None:
        for inner, leaf in find_tensors(value, path):
            self.add_tensor(inner, entry._replace(tensor=unmarked(leaf)))
        self.values[self._take(path) if is_new else join_path(path)] = value

    def add_value(self, path: Path, value: Any) -> None:
        """Take in a value with the tensors in it. A bare tensor, marked or not, is only a tensor."""
        if isinstance(value, torch.Tensor):
            self.add_tensor(path, TensorEntry(value))
            return
        if is_plain(value):
            self.values[self._take(path)] = value
            return
        for inner, leaf in find_tensors(value, path, refuse_hidden=True):
            self.add_tensor(inner, TensorEntry(unmarked(leaf), isinstance(leaf, Replicated)))
        if not isinstance(value, Replicated):
            self.values[self._take(path)] = map_tensors(value, path, lambda _, leaf: unmarked(leaf))

    def key_of(self, tensor: torch.Tensor) -> str:
        """Return the key under which a tensor in a value is stored."""
        return self._keys_by_identity[id(tensor)]

    def _take(self, path: Path) -> str:
        key = join_path(path)
        check_key(key)
        if key in self.paths:
            raise InvalidState(
                f"two places of the state have the same key {key!r}: {list(self.paths[key])} and {list(path)}",
                hint="Rename one of them",
            )
        is_text = len(path) == 1 and type(path[0]) is str
        self.paths[key] = path if is_text else tuple([part if type(part) is int else str(part) for part in path])
        if not is_text and any(type(part) is DictKey for part in path):
            self.typed[key] = tuple([part if type(part) in (int, DictKey) else str(part) for part in path])
        return key

    def typed_paths(self) -> Iterable[TypedPath]:
        """Return the paths of all keys, with the keys of dicts as they are."""
        return {**self.paths, **self.typed}.values() if self.typed else self.paths.values()


def _identity_of_dense(tensor: torch.Tensor, dense: Dense) -> Hashable:
    """Return what `identity_of` stands for, from less: all else is the same for dense tensors."""
    return dense.address, tensor.dtype, dense.form.shape


def join_path(path: Path) -> str:
    return str(path[0]) if len(path) == 1 else ".".join(map(str, path))


def children(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield key and item of each part of a mapping, list or tuple; nothing for anything else."""
    if isinstance(value, Mapping):
        yield from value.items()
    elif isinstance(value, list | tuple):
        yield from enumerate(value)


def find_tensors(
    value: Any, path: Path, *, refuse_hidden: bool = False
) -> Iterator[tuple[Path, torch.Tensor | Replicated]]:
    """Yield every tensor in nested mappings, lists and tuples, with its path. Raises InvalidState for a value that
    contains itself, and if asked to for a tensor in a place that has no path."""
    try:
        yield from _find(value, path, _TENSORS, refuse_hidden)
    except RecursionError:
        raise InvalidState(f"{join_path(path)} is nested too deeply, or contains itself") from None


def find_references(value: Any, path: Path = ()) -> Iterator[tuple[Path, TensorRef]]:
    """Yield every reference in a value that was read from a checkpoint, with the path of its place. Raises InvalidState
    for one that has none, as saves have written it."""
    yield from _find(value, path, (TensorRef,), refuse_hidden=True)


def _find(value: Any, path: Path, kinds: tuple[type, ...], refuse_hidden: bool) -> Iterator[tuple[Path, Any]]:
    if isinstance(value, kinds):
        yield path, value
        return
    if type(value) in ATOMS or is_plain(value):
        return
    if refuse_hidden:
        check_in_sight(value, path, kinds)
    is_mapping = isinstance(value, Mapping)
    for part, item in children(value):
        if type(item) not in ATOMS:
            yield from _find(item, (*path, str(part) if is_mapping else part), kinds, refuse_hidden)


def map_tensors(value: Any, path: Path, replace: Callable[[str, Any], Any]) -> Any:
    """Return the value with each tensor, marked tensor or reference replaced by `replace(key, it)`.

    The key is that of the place; a reference has its own key inside. Containers keep their exact type and order; those
    in which nothing changes are the same objects, and none is changed in place.
    """
    if isinstance(value, torch.Tensor | Replicated | TensorRef):
        return replace(join_path(path), value)
    if is_plain(value):
        return value
    changed = {}
    for part, item in children(value):
        if type(item) not in ATOMS:
            new = map_tensors(item, (*path, part), replace)
            if new is not item:
                changed[part] = new
    return with_items(value, changed) if changed else value


def with_items(container: Any, changed: Mapping[Any, Any]) -> Any:
    """Return a copy of a mapping, list or tuple, of the same type, in which some items are replaced.

    Raises InvalidState for one that cannot be changed, and whose class makes no other one from its items.
    """
    if isinstance(container, MutableMapping | list):
        clone = copy.copy(container)
        for part, item in changed.items():
            clone[part] = item
        return clone
    wanted = {**dict(children(container)), **changed}
    try:
        make = getattr(container, "_make", type(container))
        made = make(list(wanted.values()) if isinstance(container, tuple) else wanted)
        found = dict(children(made))
    except Exception:  # a class of the user's has a constructor of its own
        made, found = None, {}
    if type(made) is type(container) and list(found) == list(wanted) and all(map(is_, found.values(), wanted.values())):
        return made
    raise InvalidState(
        f"a {type(container).__name__} cannot be changed, and its class makes no other one from its items"
    )


def references_in(value: Any) -> list[str]:
    """Return the keys of all tensors that a value read from a checkpoint refers to."""
    return [reference.key for _, reference in find_references(value)]


def stock_leaves(value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    """Yield the leaves, with their paths, that stock DCP makes of a value: the items that a stock load requests.

    Mappings always fall apart, lists only if a mapping or a tensor is in them, tuples never. Tensors that stand on
    their own are left out, since they are items of the tensor kind.
    """
    if isinstance(value, Mapping):
        for part, item in value.items():
            yield from stock_leaves(item, (*path, str(part)))
    elif isinstance(value, list) and not _is_stock_leaf(value):
        for index, item in enumerate(value):
            yield from stock_leaves(item, (*path, index))
    elif not isinstance(value, torch.Tensor):
        yield path, value


def _is_stock_leaf(items: Sequence[Any]) -> bool:
    if set(map(type, items)) <= _IN_A_LEAF:
        return True
    for item in items:
        if type(item) in ATOMS:
            continue
        if isinstance(item, Mapping | torch.Tensor) or (isinstance(item, list) and not _is_stock_leaf(item)):
            return False
    return True


def unmarked(leaf: torch.Tensor | Replicated) -> torch.Tensor:
    return leaf.tensor if isinstance(leaf, Replicated) else leaf


def marked_as(leaf: torch.Tensor | Replicated, tensor: torch.Tensor) -> torch.Tensor | Replicated:
    """Return a tensor marked as the one that it replaces."""
    return Replicated(tensor) if isinstance(leaf, Replicated) else tensor


_LEAVES = ATOMS | PLAIN_TYPES


class Kind(IntEnum):
    """The kind of a unit. The numbers are the order of loading: a scheduler reads its optimizer's learning rates, and
    plain values depend on nothing."""

    MODULE = 0
    OPTIMIZER = 1
    SCHEDULER = 2
    STATEFUL = 3
    VALUE = 4


class Unit(NamedTuple):
    """One part of the state: a live object, or a tensor or plain value with everything in it that is no live object.

    `path` leads to it from `state`, the whole of it. `is_own` is True if it was marked as the rank's own.
    """

    kind: Kind
    path: Path
    item: Any
    state: Mapping[str, Any]
    is_own: bool = False

    @property
    def key(self) -> str:
        """The flat key; the keys of its parts begin with this and a dot."""
        return join_path(self.path)

    @property
    def is_in_fixed(self) -> bool:
        """True if its container cannot be changed."""
        return not isinstance(self._containers()[-1], MutableMapping | list)

    @property
    def typed_path(self) -> Path:
        """The path, with keys of dicts that are no text marked as such."""
        return self.path if set(map(type, self.path)) == {str} else typed(self.path, self._containers())

    def replace(self, item: Any) -> None:
        """Put another item into its place. Tuples around it, and mappings that cannot be changed, are made anew. Raises
        InvalidState for one that cannot be made."""
        container, part, new = self._change(item)
        container[part] = new

    def check_replaceable(self, item: Any) -> None:
        """Raise InvalidState if another item cannot be put into its place."""
        self._change(item)

    def _change(self, item: Any) -> tuple[Any, Any, Any]:
        """Return the innermost container that can be changed, the part of it to replace, and what to put there."""
        new: Any = OwnOfRank(item) if self.is_own else item
        for container, part in zip(reversed(self._containers()), reversed(self.path), strict=True):
            if isinstance(container, MutableMapping | list):
                return container, part, new
            new = with_items(container, {part: new})
        raise InvalidState(f"the state is a {type(self.state).__name__}, which cannot be changed")

    def _containers(self) -> list[Any]:
        """Return the state, and what it has now on the way to the item."""
        found: list[Any] = [self.state]
        for part in self.path[:-1]:
            found.append(found[-1][part])
        return found


def kind_of(item: Any) -> Kind | None:
    """Return the kind of live object that an item is, None for a tensor, a plain value or a container."""
    if isinstance(item, type | torch.Tensor):
        return None
    if isinstance(item, torch.nn.Module):
        return Kind.MODULE
    if isinstance(item, torch.optim.Optimizer):
        return Kind.OPTIMIZER
    if isinstance(item, LRScheduler):
        return Kind.SCHEDULER
    methods = (getattr(item, name, None) for name in ("state_dict", "load_state_dict"))
    return Kind.STATEFUL if all(map(callable, methods)) else None


def is_loader(item: Any) -> bool:
    """Return True for data loaders and samplers, of whatever library."""
    names = " ".join(base.__name__.lower() for base in type(item).__mro__)
    return "loader" in names or "sampler" in names


def takes_all_ranks(item: Any) -> bool:
    """Return True for an object that takes the states of all ranks where another number of ranks saved them."""
    return callable(getattr(item, "load_rank_states", None))


def check_state(state: Any) -> None:
    """Raise InvalidState for a state that is no mapping, or whose keys are not text."""
    if not isinstance(state, Mapping) or kind_of(state) is not None:
        raise InvalidState(f"a state is a dict, not a {type(state).__name__}", hint='Wrap it: {"model": model}')
    for key in state:
        if not isinstance(key, str) or not key:
            raise InvalidState(f"the keys of a state are text, not {key!r}")


def units_of(state: Any) -> list[Unit]:
    """Take a state apart, in its own order.

    Raises InvalidState when it is not a mapping with text as keys, contains itself, or when a key begins with another
    one and a dot, so that its owner would be ambiguous.
    """
    check_state(state)
    try:
        units: list[Unit] = []
        for key, item in state.items():
            if type(item) in PLAIN_TYPES:
                units.append(Unit(Kind.VALUE, (key,), item, state))
            else:
                units.extend(_walk(item, (key,), state))
    except RecursionError:
        raise InvalidState(f"{key} is nested too deeply, or contains itself") from None
    _refuse_overlap([unit.key for unit in units])
    return units


def _walk(item: Any, path: Path, state: Mapping[str, Any]) -> Iterator[Unit]:
    if type(item) in PLAIN_TYPES:
        yield Unit(Kind.VALUE, path, item, state)
        return
    if is_own := isinstance(item, OwnOfRank):
        item = item.item
    kind = kind_of(item)
    if kind is Kind.STATEFUL and is_prepared_loader(item):
        check_has_position(join_path(path), item)
    holds_objects = isinstance(item, OwnOfRank) or (kind is None and _holds_objects(item))
    if not holds_objects:
        yield Unit(Kind.VALUE if kind is None else kind, path, item, state, is_own)
        return
    if is_own:
        raise InvalidState(
            f"{join_path(path)} is marked as the rank's own, and is a {type(item).__name__} that holds objects",
            hint="Mark modules, optimizers, data loaders, tensors and plain values one by one",
        )
    check_in_sight(item, path, _TENSORS)
    for part, inner in children(item):
        yield from _walk(inner, (*path, part), state)


def _holds_objects(item: Any) -> bool:
    if isinstance(item, torch.Tensor | Replicated) or is_plain(item):
        return False
    return any(
        isinstance(inner, OwnOfRank) or kind_of(inner) is not None or _holds_objects(inner)
        for _, inner in children(item)
        if type(inner) not in _LEAVES
    )


def _refuse_overlap(keys: Iterable[str]) -> None:
    taken: set[str] = set()
    above: set[str] = set()
    for key in keys:
        if key in taken:
            raise _overlap(key, key)
        taken.add(key)
        end = key.rfind(".")
        while end >= 0 and (upper := key[:end]) not in above:
            above.add(upper)
            end = key.rfind(".", 0, end)
    if both := sorted(taken & above):
        raise _overlap(both[0], min(key for key in taken if key.startswith(f"{both[0]}.")))


def _overlap(key: str, other: str) -> InvalidState:
    return InvalidState(
        f"the state's keys {key!r} and {other!r} overlap: their parts cannot be told apart",
        hint="Rename one of them",
    )
