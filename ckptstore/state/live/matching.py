"""Matching of a checkpoint with a state: the place of each stored key, and every way in which the two do not fit."""

from __future__ import annotations

import logging
import re
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, fields
from itertools import chain
from typing import Any, NamedTuple

import torch

from ckptstore.errors import CheckpointDamaged, InvalidInput, StateMismatch
from ckptstore.runtime.near import meant, nearest, nearest_key, shown
from ckptstore.state.index.part import Tensor
from ckptstore.state.live.flatten import TensorRef
from ckptstore.state.live.patterns import fits, fitting, patterns_of
from ckptstore.state.tensors.dense import Dense, dense_of
from ckptstore.state.tensors.overlap import Conflict, PlacedTensor, conflicts_of, local_memory, overlaps_itself
from ckptstore.state.tensors.placement import PLAIN_TYPES, is_wrapped, name_of, wrapped_in
from ckptstore.state.tensors.tensor_memory import obstacle_of
from ckptstore.state.tensors.wrapped import Wrapped, check_same

logger = logging.getLogger("ckptstore")


@dataclass(frozen=True, slots=True)
class Saved:
    """The contents of a checkpoint for this rank.

    `values` are decoded, with a `TensorRef` for each tensor in them. `aliases` leads from further keys of tied weights
    to those in `tensors`. `skipped` are keys that stay as they are, and are neither missing nor unexpected: those whose
    values differed between ranks, when the caller chose to skip them.
    """

    tensors: Mapping[str, Tensor]
    values: Mapping[str, Any]
    aliases: Mapping[str, str] = field(default_factory=dict)
    skipped: frozenset[str] = frozenset()
    modules: Mapping[str, Callable[[], Mapping[str, Any]]] = field(default_factory=dict)
    """By the keys of modules, the functions that return their metadata, as `FlatState.modules` has it."""


class Target(NamedTuple):
    """Memory to be filled: `tensor` takes the whole tensor, or its part of it, that the checkpoint has as `source`."""

    tensor: torch.Tensor
    source: str
    dense: Dense | None = None
    """The memory of the tensor, where it is dense."""


@dataclass(slots=True)
class Mismatch:
    """Every way in which a checkpoint does not fit a state.

    `missing` keys are in the state alone, `unexpected` ones in the checkpoint alone, though they belong to a part of it
    that the state names. `differing` has the difference for keys that are in both. `names` are those that the state
    gives to its parts, `absent` those of them under which the checkpoint has nothing at all, `there` the names of the
    checkpoint's own parts. `unused` are patterns that fit nothing, with the nearest key that may have been meant.
    `is_empty` is True if nothing at all would be loaded. `left_out` are the checkpoint's own parts that the state does
    not name. `from_dicts` has the keys of modules for which the checkpoint has what their `state_dict()` returned.
    `advice` is the way out if code of a module that could translate names was of no use.
    """

    missing: set[str] = field(default_factory=set)
    unexpected: set[str] = field(default_factory=set)
    differing: dict[str, str] = field(default_factory=dict)
    names: frozenset[str] = field(default=frozenset(), compare=False)
    absent: frozenset[str] = field(default=frozenset(), compare=False)
    there: frozenset[str] = field(default=frozenset(), compare=False)
    unused: dict[str, str | None] = field(default_factory=dict)
    is_empty: bool = field(default=False, compare=False)
    left_out: frozenset[str] = field(default=frozenset(), compare=False)
    from_dicts: frozenset[str] = field(default=frozenset(), compare=False)
    advice: str = field(default="", compare=False)

    def check(self, *, strict: bool) -> None:
        """Raise StateMismatch with the whole list. Without `strict` only differing keys count, and that something is
        loaded. Raises InvalidInput for a pattern that fits nothing, strict or not."""
        for pattern, near in self.unused.items():
            raise InvalidInput(
                f"include={pattern!r} fits no key that the checkpoint has below the names of the state"
                f"{meant(near)} The state names {shown(self.names)}; the checkpoint has {shown(self.there)}",
                hint="Keys are like model.0.weight, and `*` stands for anything in them",
            )
        parts = [_listed("differ", [f"{key} {how}" for key, how in self.differing.items()])]
        if strict or (self.is_empty and (self.missing or self.unexpected)):
            parts += [self.absence(name).rstrip(".") for name in sorted(self.absent)]
            parts.append(_listed("missing in the checkpoint", self.missing))
            parts.append(_listed("without a place in the state", self.unexpected))
        if any(parts):
            helps = strict and not self.differing and not self.is_empty
            raise StateMismatch(
                f"the checkpoint does not fit the state: {'. '.join(filter(None, parts))}",
                hint=self._cause() or self.advice or ("strict=False leaves out what one side lacks" if helps else None),
            )

    def _cause(self) -> str | None:
        """Return advice if one side has objects, and the other one what their `state_dict()` returned."""
        saved = _optimizer_dicts(self.unexpected) | (self.names & self.unexpected)  # a module's has a type of its own
        if saved:
            return (
                f"The checkpoint has what state_dict() returned for {', '.join(map(repr, sorted(saved)))}, and the "
                'state has objects. Resume with what it returns, as in {"model": model.state_dict()}, and pass that to '
                "load_state_dict; or save the objects themselves"
            )
        if mine := _optimizer_dicts(self.missing):
            return (
                f"The state has what state_dict() returned for {', '.join(map(repr, sorted(mine)))}, and the "
                'checkpoint was saved from objects. Resume with the objects themselves, as in {"model": model, '
                '"optimizer": optimizer}'
            )
        return None

    def absence(self, name: str) -> str:
        """Return the sentence on a name of the state under which the checkpoint has nothing."""
        near = nearest(name, self.there - self.names)
        return f"the checkpoint has nothing called {name!r}, but {shown(self.there)}{meant(near)}"

    @staticmethod
    def joined(parts: Iterable[Mismatch]) -> Mismatch:
        """Return the mismatch of all ranks: a key that any rank misses is missing, one that a rank names and none can
        place is unexpected."""
        every = list(parts)
        unplaced: dict[frozenset[str], set[str]] = {}
        for part in every:  # ranks that give the same names must all have left the key
            unplaced[part.names] = unplaced.get(part.names, part.unexpected) & part.unexpected
        names = frozenset[str]().union(*unplaced)
        uneven = {_part_of(name) for name in names - names.intersection(*unplaced)}  # what one lacks another may name
        return Mismatch(
            missing=set().union(*(part.missing for part in every)),
            unexpected={
                key
                for keys in unplaced.values()
                for key in keys
                if all(key in others or not _parts_of(key, names) for names, others in unplaced.items())
            },
            differing={key: how for part in every for key, how in part.differing.items()},
            names=names,
            absent=frozenset()
            .union(*(part.absent for part in every))
            .difference(*(part.names - part.absent for part in every)),
            there=frozenset().union(*(part.there for part in every)),
            unused={
                pattern: near
                for pattern, near in (every[0].unused.items() if every else ())
                if all(pattern in part.unused for part in every)
            },
            is_empty=bool(every) and all(part.is_empty for part in every),
            left_out=frozenset.intersection(*(part.left_out for part in every)) - uneven if every else frozenset(),
            from_dicts=frozenset().union(*(part.from_dicts for part in every)),
            advice=next((part.advice for part in every if part.advice), ""),
        )

    def to_json(self) -> dict[str, Any]:
        """Return the mismatch as JSON for another rank."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        return {name: sorted(value) if isinstance(value, Set) else value for name, value in values.items()}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Mismatch:
        mutable = {name: set(value[name]) for name in ("missing", "unexpected")}
        frozen = {name: frozenset(value[name]) for name in ("names", "absent", "there", "left_out", "from_dicts")}
        return Mismatch(**{**value, **mutable, **frozen})


class Matching:
    """Pairs places of a state with contents of a checkpoint; collects the tensors to read and everything that does not
    fit."""

    def __init__(self, saved: Saved, *, include: str | Sequence[str] | None = None, casts: bool = False) -> None:
        self.saved = saved
        self.casts: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Tensors of the state, each with memory of the saved dtype that is filled in its place."""
        self.may_cast = casts
        """True if tensors that were saved in another floating-point dtype are cast."""
        self.targets: dict[str, Target] = {}
        self.moved: dict[str, torch.Tensor] = {}
        """New tensors for places whose memory is for something else too. Complete after `close`."""
        self.translated: set[str] = set()
        """The keys of tensors that code of a module fills from other stored names."""
        self.lacking: dict[str, tuple[str, tuple[int, ...]]] = {}
        """The dtype and shape of each tensor of the state that the checkpoint lacks."""
        self.shared: list[Conflict] = []
        """Pairs of stored tensors, beside those that `close` finds by memory, of which the state has one."""
        self.mismatch = Mismatch()
        self._include = patterns_of(include)
        self.includes = fitting(include)
        """True for a key that `include` has, or everything below it."""
        self._keys = sorted(dict.fromkeys(chain(saved.tensors, saved.aliases, saved.values)))  # in order, as a rule
        self._placed: set[str] = set()
        self._places: list[PlacedTensor] = []

    def includes_below(self, key: str) -> bool:
        """Return True if `include` has a key, or anything that the checkpoint has below it."""
        return self.includes(key) or any(map(self.includes, self.below(key)))

    def below(self, key: str) -> list[str]:
        """Return the keys that the checkpoint has below a key."""
        return [*_below_one(self._keys, key)]

    def unplaced_below(self, key: str) -> list[str]:
        """Return the keys that the checkpoint has below a key and a load asks for, and that have no place yet."""
        known = self._placed.union(self.saved.skipped)
        return [name for name in self.below(key) if name not in known and self.includes(name)]

    def placed(self, *keys: str) -> None:
        """Note that these keys of the checkpoint have a place in the state."""
        self._placed.update(keys)

    def left(self, *keys: str) -> None:
        """Note that these keys, and all below, have no place in the state, though they are read."""
        self._placed.difference_update(name for key in keys for name in (key, *self.below(key)))

    def source_of(self, key: str) -> str | None:
        """Return the key under which a tensor's bytes are stored, None when there is no such tensor."""
        source = self.saved.aliases.get(key, key)
        return source if source in self.saved.tensors else None

    def take_tensor(
        self, keys: Sequence[str], tensor: torch.Tensor, *, live: torch.Tensor | None = None, may_move: bool = False
    ) -> bool:
        """Register a tensor to be filled, that the state knows under these keys. Return False, with the reason noted,
        if it cannot be.

        One of the keys in the checkpoint is enough: tied weights may have been stored under either name. If they were
        not tied when they were saved, all keys of them that the checkpoint has are compared before anything is filled.
        `live` is the parameter or buffer whose memory it is in the end, if `tensor` is a copy. With `may_move` a new
        tensor is made, and noted in `moved`, if something else is to be filled into the same memory.
        """
        if len(keys) == 1 and self._take_dense(keys[0], tensor, live, may_move):
            return True
        self._placed.update(keys)
        asked = [key for key in keys if self.includes(key)]
        if not asked or not self.saved.skipped.isdisjoint(keys):
            return False
        obstacle = obstacle_of(tensor)
        if obstacle is not None:
            self.mismatch.differing[keys[0]] = f"is {obstacle[0]} in the state, which cannot be loaded into"
            return False
        if is_wrapped(tensor):
            return self._take_wrapped(keys, tensor)
        found = {source: key for key in keys if (source := self.source_of(key)) is not None}
        wanted = {source: key for source, key in found.items() if key in asked} or found
        if not wanted:
            self.lacking[keys[0]] = name_of(tensor.dtype), tuple(tensor.shape)
            self.miss(keys[0], "a tensor")
            return False
        if any(map(overlaps_itself, local_memory(tensor))):
            self.mismatch.differing[keys[0]] = (
                "has several elements in the same memory in the state, as after expand(): give it memory for each "
                "element, with clone() or contiguous()"
            )
            return False
        places = [
            PlacedTensor(key, tensor, source, self.saved.tensors[source].torch_dtype, live, may_move)
            for source, key in wanted.items()
        ]
        fits = [self._take_placed(place, keys[0]) for place in places]
        return all(fits)

    def _take_dense(self, key: str, tensor: torch.Tensor, live: torch.Tensor | None, may_move: bool) -> bool:
        """Register a dense tensor that fits the stored one under its only key, as most do; return False for others."""
        present = self.saved.tensors.get(key)
        if present is None or self._include is not None or self.saved.skipped or key in self.targets:
            return False
        dense = dense_of(tensor)
        if dense is None or dense.form.dtype != present.dtype or dense.form.shape != present.shape:
            return False
        self._placed.add(key)
        self._places.append(PlacedTensor(key, tensor, key, tensor.dtype, live, may_move, dense))
        self.targets[key] = Target(tensor, key, dense)
        return True

    def _take_placed(self, place: PlacedTensor, first: str) -> bool:
        """Pair a tensor, known as `first`, with one of the stored tensors that belong there. The first one fills it."""
        tensor, source = place.tensor, place.source
        present, can_cast = self.saved.tensors[source], False
        form = name_of(tensor.dtype), tuple(tensor.shape)
        if form != present.form:
            wanted = Tensor(source, *form)
            can_cast = self.may_cast and _can_cast(present, wanted)
        if form != present.form and not can_cast:
            way = ' (dtype="state" casts it)' if _can_cast(present, wanted) else ""
            name = first if first not in self.mismatch.differing and first not in self.targets else place.key
            self.mismatch.differing[name] = f"is {present} in the checkpoint and {wanted} in the state{way}"
            return False
        self._places.append(place)
        if first in self.targets:
            return True
        filled = tensor
        if can_cast:
            filled = torch.empty_like(tensor, dtype=present.torch_dtype, requires_grad=False)
            self.casts.append((tensor, filled))
        self.targets[first] = Target(filled, source)
        return True

    def _take_wrapped(self, keys: Sequence[str], tensor: torch.Tensor) -> bool:
        """Register the inner tensors of a tensor that wraps others."""
        found = {key: saved for key in keys if (saved := self._wrapped_at(key))}
        for name in (name for saved in found.values() for name in saved):
            self._placed.update((name, *self.below(name)))
        if not found:
            self.miss(keys[0], f"a {type(getattr(tensor, '_local_tensor', tensor)).__name__}, which wraps tensors,")
            return False
        fits = [self._take_wrapped_from(key, saved, tensor) for key, saved in found.items()]
        return all(fits)

    def _take_wrapped_from(self, key: str, saved: Mapping[str, Wrapped], tensor: torch.Tensor) -> bool:
        for name, target in wrapped_in(tensor, key).items():
            try:
                if name not in saved:
                    raise StateMismatch(f"{key} was saved in other parts than those of the state")
                check_same(saved[name], target, name)
            except StateMismatch as error:
                self.refuse(name, error)
                return False
            self._fill_wrapped(name, target, saved[name])
        return True

    def take_state_dict(self, key: str) -> None:
        """Give the checkpoint's dict of a module's tensors its place, if the module at this key took exactly those.

        Call it when the module is matched. A module's own state has nothing under the key itself.
        """
        held = self.saved.values.get(key)
        if not isinstance(held, Mapping) or not all(isinstance(item, TensorRef) for item in held.values()):
            return
        below = set(self.below(key))
        is_missing = any(name.startswith(f"{key}.") for name in self.mismatch.missing)
        if below == {f"{key}.{name}" for name in held} and below <= self._placed and not is_missing:
            self._placed.add(key)
            self.mismatch.from_dicts |= {key}

    def refuse(self, key: str, error: StateMismatch) -> None:
        """Note that the contents of the checkpoint under a key, or in parts of it, cannot be loaded at all."""
        self._placed.update((key, *self._wrapped_at(key), *self.below(key)))
        self.mismatch.differing[key] = f"cannot be loaded: {error.message}"

    def parts_of(self, key: str) -> list[str]:
        """Return the keys of the parts of a distributed tensor that wraps others; none for all other tensors."""
        return [name for name in self._wrapped_at(key) if name != key]

    def _wrapped_at(self, key: str) -> dict[str, Wrapped]:
        """Return the checkpoint's values for a tensor that wraps others: one value, or one for each part."""
        first = bisect_left(self._keys, f"{key}@")
        names = [key, *self._keys[first : bisect_left(self._keys, f"{key}A", first)]]  # "A" follows "@"
        return {name: value for name in names if isinstance(value := self.saved.values.get(name), Wrapped)}

    def _fill_wrapped(self, key: str, target: Wrapped, found: Wrapped) -> None:
        for name, inner in target.items():
            stored = found[name]
            if isinstance(inner, Wrapped):
                self._fill_wrapped(f"{key}.{name}", inner, stored)
            else:
                self.take_tensor([f"{key}.{name}", stored.key], inner)

    def make_tensor(self, key: str, device: torch.device | None) -> torch.Tensor:
        """Return a new plain tensor to be filled with the checkpoint's tensor under a key. Without a device it is made
        on the CPU, whatever torch's default device is.

        Raises CheckpointDamaged when a value refers to a tensor that the index lacks, and StateMismatch for a tensor
        that wraps others.
        """
        self._placed.add(key)
        source = self.source_of(key)
        if source is None and self._wrapped_at(key):
            raise StateMismatch(
                f"{key} wraps tensors in the checkpoint, and the state has nothing to load it into",
                hint="Put a tensor there that was made as the saved one was",
            )
        if source is None:
            raise CheckpointDamaged(f"a value refers to the tensor {key!r}, which the index lacks")
        saved = self.saved.tensors[source]
        made = self.targets.get(key)
        if made is None:
            made = Target(torch.empty(saved.shape, dtype=saved.torch_dtype, device=device or "cpu"), source)
            self.targets[key] = made
        return made.tensor

    def _share_memory(self) -> list[Conflict]:
        """Fill each memory once, and return the pairs that must agree because they are for the same memory."""
        places = self._places
        while True:
            conflicts, copies = conflicts_of(places)
            moving = {id(place): place for pair in conflicts if (place := _moving(pair)) is not None}
            if not moving:
                break
            for place in moving.values():
                made = torch.empty_like(place.tensor, requires_grad=False)
                self.moved[place.key], self.targets[place.key] = made, Target(made, place.source)
            places = [place for place in places if id(place) not in moving]
        for place in copies:
            if place.key in self.targets and self.targets[place.key].tensor is place.tensor:
                del self.targets[place.key]
        return conflicts

    def miss(self, key: str, what: str) -> None:
        """Note that the state has something for which the checkpoint has nothing, or something of another kind."""
        self._placed.add(key)
        if not self.saved.skipped.isdisjoint({key, *above(key)}):
            return
        if key in self.saved.values:
            self.mismatch.differing[key] = f"is a plain value in the checkpoint and {what} in the state"
        elif self.source_of(key) is not None:
            self.mismatch.differing[key] = f"is a tensor in the checkpoint and {what} in the state"
        else:
            self.mismatch.missing.add(key)

    def close(self, names: Iterable[str]) -> list[Conflict]:
        """Note the keys below the state's top-level names that nothing took, and the names and patterns that stand for
        nothing. Return the pairs of stored tensors for the same memory, to compare before anything is filled."""
        conflicts = [*self._share_memory(), *self.shared]
        mismatch, known = self.mismatch, {*self._keys, *self.saved.skipped}
        mismatch.names = frozenset(map(str, names))
        held, empty = _below(sorted(known) if self.saved.skipped else self._keys, mismatch.names)
        mismatch.absent = frozenset(name for key in mismatch.missing for name in _parts_of(key, empty))
        for key in held - self._placed - self.saved.skipped:
            is_stored = key in self.saved.values or self.source_of(key) is not None
            if is_stored and self.includes(key):
                mismatch.unexpected.add(key)
        taken = self._placed - mismatch.missing
        inside = {key for key in taken - known if not self.saved.values.keys().isdisjoint(above(key))}
        mismatch.is_empty = not self.targets and not any(map(self.includes, (taken & known) | inside))
        for pattern in self._include or ():
            if not any(fits(key, pattern) for key in (*held, *inside)):
                near = nearest_key(pattern, known)
                mismatch.unused[pattern] = near if near and _parts_of(near, mismatch.names) else None
        mismatch.left_out = frozenset(map(_part_of, known - held)) - mismatch.names
        if mismatch.absent or mismatch.unused:
            mismatch.there = frozenset(map(_part_of, known))
        return conflicts


def _moving(conflict: Conflict) -> PlacedTensor | None:
    """Return the place, of two for the same memory, that can move elsewhere."""
    places = (conflict.second.place, conflict.first.place)
    return next((place for place in places if place.may_move and type(place.tensor) in PLAIN_TYPES), None)


def _part_of(key: str) -> str:
    """Return the name of the checkpoint's own part to which a key belongs."""
    return re.split("[.@]", key, maxsplit=1)[0]


def _below(keys: Sequence[str], names: Set[str]) -> tuple[set[str], set[str]]:
    """Return those keys, which are sorted, that belong to the parts of the state with these names, and the names of
    parts that have none."""
    known = set(keys)
    found = known & names
    rest = known - found
    if len(rest) < len(names):
        found.update([key for key in rest if _parts_of(key, names)])
    else:
        found.update(*(_below_one(keys, name) for name in names))
    return found, {name for name in names - known if not _below_one(keys, name)}


def _below_one(keys: Sequence[str], key: str) -> Sequence[str]:
    """Return those keys, which are sorted, that are below a key."""
    first = bisect_left(keys, f"{key}.")
    return keys[first : bisect_left(keys, f"{key}/", first)]  # "/" follows "."


def _parts_of(key: str, names: Collection[str]) -> list[str]:
    """Return those names of parts of the state to which a key belongs: its own, or that of something above it."""
    found, end = [key] if key in names else [], key.find(".")
    while end >= 0:
        if key[:end] in names:
            found.append(key[:end])
        end = key.find(".", end + 1)
    return found


def _can_cast(present: Tensor, wanted: Tensor) -> bool:
    both = present.torch_dtype.is_floating_point and wanted.torch_dtype.is_floating_point
    return both and present.dtype != wanted.dtype and present.shape == wanted.shape


def above(key: str) -> set[str]:
    """Return the keys of everything that a key may be inside of."""
    parts = key.split(".")
    return {".".join(parts[:count]) for count in range(1, len(parts))}


_IN_STATE_DICT = re.compile(r"(.+?)\.(?:state|param_groups)\.\d+\.(?!\d)")
"""A key of what the `state_dict()` of an optimizer returns: parameters and groups have numbers there, not names."""
_MOST_LISTED = 10


def _optimizer_dicts(keys: Iterable[str]) -> set[str]:
    return {match[1] for key in keys if (match := _IN_STATE_DICT.match(key))}


def _listed(what: str, which: Collection[str]) -> str:
    """Return the number of items and the first of them. If there are more, all of them are logged."""
    if not which:
        return ""
    ordered = sorted(which)
    text = f"{len(which)} {what}: {', '.join(ordered[:_MOST_LISTED])}"
    if len(ordered) <= _MOST_LISTED:
        return text
    logger.info("%d %s: %s", len(ordered), what, ", ".join(ordered))
    more = len(ordered) - _MOST_LISTED
    return f'{text} and {more} more, which rank 0 has logged (logger "ckptstore", level INFO)'
