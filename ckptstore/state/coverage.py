"""Whether the files of a checkpoint hold every key that any rank has: what the leader asks before it commits. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ckptstore.errors import InvalidState
from ckptstore.group.base import spoken
from ckptstore.state.index import TensorIndex
from ckptstore.state.items import Structure

_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Expected:
    """Every key that any rank has, and which ranks have it."""

    classes: tuple[int, ...] = ()
    """For each rank the number of its structure."""
    keys: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """For each key the structures that have it."""

    @staticmethod
    def of(structures: Sequence[Structure], classes: Sequence[int]) -> Expected:
        """What ranks with these structures have."""
        found: dict[str, list[int]] = {}
        for number, structure in enumerate(structures):
            for row in structure.rows:
                found.setdefault(row.key, []).append(number)
        known: dict[tuple[int, ...], tuple[int, ...]] = {}  # most keys are in the same structures
        keys = {key: known.setdefault(tuple(numbers), tuple(numbers)) for key, numbers in found.items()}
        return Expected(tuple(classes), keys)

    def ranks_of(self, key: str) -> list[int]:
        """The ranks that have a key."""
        numbers = self.keys.get(key, ())
        return [rank for rank, number in enumerate(self.classes) if number in numbers]

    def check(self, index: TensorIndex) -> None:
        """Raise InvalidState, with keys and ranks, unless every key is there for each rank that has it, and every
        tensor with all its elements, once."""
        holes = index.incomplete()
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


def _refusal(what: str) -> InvalidState:
    return InvalidState(
        f"{what}: the ranks differ in what they have of it",
        hint="All ranks must give the same structure for what they share",
    )
