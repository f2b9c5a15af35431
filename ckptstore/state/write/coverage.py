"""The leader's check, before it commits, that the files of a checkpoint hold every key that any rank has. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np

from ckptstore.errors import InvalidState
from ckptstore.group.base import spoken
from ckptstore.state.index.items import Structure
from ckptstore.state.index.tensor_index import TensorIndex, are_apart

_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Expected:
    """Every key that any rank has, and which ranks have it."""

    classes: tuple[int, ...] = ()
    """The number of each rank's structure."""
    keys: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """The structures that have a key, for each key."""

    @staticmethod
    def of(structures: Sequence[Structure], classes: Sequence[int]) -> Expected:
        """Return the keys of ranks with these structures."""
        found: dict[str, list[int]] = {}
        for number, structure in enumerate(structures):
            for row in structure.rows:
                found.setdefault(row.key, []).append(number)
        known: dict[tuple[int, ...], tuple[int, ...]] = {}  # most keys are in the same structures
        keys = {key: known.setdefault(tuple(numbers), tuple(numbers)) for key, numbers in found.items()}
        return Expected(tuple(classes), keys)

    @staticmethod
    def of_one(keys: Iterable[str]) -> Expected:
        """Return the keys of a rank alone."""
        return Expected((0,), dict.fromkeys(keys, (0,)))

    def ranks_of(self, key: str) -> list[int]:
        """Return the ranks that have a key, or parts of it."""
        parts = (numbers for name, numbers in self.keys.items() if name.startswith(f"{key}@"))
        numbers = self.keys.get(key) or {number for part in parts for number in part}
        return [rank for rank, number in enumerate(self.classes) if number in numbers]

    def check(self, index: TensorIndex) -> None:
        """Raise InvalidState, with keys and ranks, unless every key exists for each rank that has it, and every tensor
        with all its elements, once."""
        holes = [*index.incomplete(), *_torn(index)]
        if holes:
            raise _refusal(f"the chunks of {self._words(holes)} do not cover the tensor exactly once")
        lost = self._lost(index)
        if lost:
            raise _refusal(f"{self._words(lost)} would be in no file of the checkpoint")

    def _lost(self, index: TensorIndex) -> list[str]:
        apart = self.keys.keys() - index.common_keys
        if not apart:
            return []
        own = {part.rank: index.own_keys(part.rank) for part in index.parts}
        return sorted(key for key in apart if any(key not in own[rank] for rank in self.ranks_of(key)))

    def _words(self, keys: Iterable[str]) -> str:
        every = list(keys)
        shown = [f"{key} ({spoken(ranks)})" if (ranks := self.ranks_of(key)) else key for key in every[:_SHOWN]]
        return ", ".join(shown) + (f" and {len(every) - _SHOWN} more" if len(every) > _SHOWN else "")


def _torn(index: TensorIndex) -> list[str]:
    """Return the distributed tensors whose wrapped parts do not cover them exactly once."""
    parts: dict[str, list[tuple[list[int], list[int]]]] = {}
    shapes: dict[str, list[int]] = {}
    for value in index.common_values().values():
        if isinstance(value, dict) and value.get("$t") == "wrapper" and value["v"]["part"]:
            key, offsets, shape = value["v"]["part"]
            parts.setdefault(key, []).append((offsets, value["v"]["shape"]))
            shapes[key] = shape
    return [key for key, boxes in parts.items() if not _is_covered(shapes[key], boxes)]


def _is_covered(shape: list[int], boxes: list[tuple[list[int], list[int]]]) -> bool:
    places = np.array(boxes, np.int64)
    is_full = int(places[:, 1].prod(axis=1).sum()) == prod(shape)
    return is_full and (len(boxes) == 1 or are_apart(np.array(shape, np.int64), places[:, 0], places[:, 1]))


def _refusal(what: str) -> InvalidState:
    return InvalidState(
        f"{what}: the ranks differ in what they have of it",
        hint="All ranks must give the same structure for what they share",
    )
