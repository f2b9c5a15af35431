"""The parts of a nested state that are saved and loaded each in its own way, and their order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from torch.optim.lr_scheduler import LRScheduler

from ckptstore.errors import InvalidState
from ckptstore.state.index.packed_values import is_plain
from ckptstore.state.live.flatten import ATOMS, OwnOfRank, Path, Replicated, children, join_path
from ckptstore.state.tensors.placement import PLAIN_TYPES

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

    `parent` is its container, `path[-1]` its place there. `is_own` is True if it was marked as the rank's own.
    """

    kind: Kind
    path: Path
    item: Any
    parent: Any
    is_own: bool = False

    @property
    def key(self) -> str:
        """The flat key; the keys of its parts begin with this and a dot."""
        return join_path(self.path)

    def replace(self, item: Any) -> None:
        """Put another item into its place. Raises InvalidState if the container cannot be changed."""
        if not isinstance(self.parent, MutableMapping | list):
            kind = type(self.parent).__name__
            raise InvalidState(f"{self.key} cannot be loaded: it stands in a {kind}, which cannot be changed")
        self.parent[self.path[-1]] = OwnOfRank(item) if self.is_own else item


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


def units_of(state: Any) -> list[Unit]:
    """Take a state apart, in its own order.

    Raises InvalidState when it is not a mapping with text as keys, contains itself, or when a key begins with another
    one and a dot, so that its owner would be ambiguous.
    """
    if not isinstance(state, Mapping) or kind_of(state) is not None:
        raise InvalidState(f"a state is a dict, not a {type(state).__name__}", hint='Wrap it: {"model": model}')
    for key in state:
        if not isinstance(key, str) or not key:
            raise InvalidState(f"the keys of a state are text, not {key!r}")
    try:
        units = [unit for key, item in state.items() for unit in _walk(item, (key,), state)]
    except RecursionError:
        raise InvalidState("the state is nested too deeply, or contains itself") from None
    _refuse_overlap(sorted(unit.key for unit in units))
    return units


def _walk(item: Any, path: Path, parent: Any) -> Iterator[Unit]:
    if type(item) in PLAIN_TYPES:
        yield Unit(Kind.VALUE, path, item, parent)
        return
    if isinstance(item, OwnOfRank):
        yield _own_unit(item.item, path, parent)
        return
    kind = kind_of(item)
    if kind is None and _holds_objects(item):
        for part, inner in children(item):
            yield from _walk(inner, (*path, part), item)
    else:
        yield Unit(Kind.VALUE if kind is None else kind, path, item, parent)


def _own_unit(item: Any, path: Path, parent: Any) -> Unit:
    kind = kind_of(item)
    if (kind is None and _holds_objects(item)) or isinstance(item, OwnOfRank):
        raise InvalidState(
            f"{join_path(path)} is marked as the rank's own, and is a {type(item).__name__} that holds objects",
            hint="Mark modules, optimizers, data loaders, tensors and plain values one by one",
        )
    return Unit(Kind.VALUE if kind is None else kind, path, item, parent, is_own=True)


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
    for key in keys:
        end = key.find(".")
        while end >= 0 and key[:end] not in taken:
            end = key.find(".", end + 1)
        if end >= 0 or key in taken:
            other = key[:end] if end >= 0 else key
            raise InvalidState(
                f"the state's keys {other!r} and {key!r} overlap: their parts cannot be told apart",
                hint="Rename one of them",
            )
        taken.add(key)
