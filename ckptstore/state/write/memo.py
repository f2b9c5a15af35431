"""Results that a save would compute again though nothing has changed, kept from one save of a store to the next.

A training job saves the same structure again and again. All results follow from keys, dtypes, shapes and places alone,
and are used only if these are equal. The memo holds no tensor of the state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ckptstore.runtime.collector import collector_paused
from ckptstore.state.index.items import Item, Structure, without_digests
from ckptstore.state.write.agree import Agreement, Negotiator
from ckptstore.state.write.assignment import RankPlan, plan_rank
from ckptstore.state.write.outlining import Outliner, RankStructures

Made = TypeVar("Made")


@dataclass(slots=True)
class SaveMemo:
    """The memo of one store in one process, for one save at a time."""

    negotiator: Negotiator = field(default_factory=Negotiator)
    _cache: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    _turn: int = 0

    def next_turn(self) -> int:
        """Return another number for each save of this process; it selects the copies to check."""
        self._turn += 1
        return self._turn

    @collector_paused()
    def cached(self, name: str, made_for: object, make: Callable[[], Made]) -> Made:
        """Return the last result of `make` under that name, if it was made for an equal object; else call `make`."""
        last = self._cache.get(name)
        if last is None or last[0] != made_for:
            last = self._cache[name] = made_for, make()  # one assignment, so that no error comes between the two
        made: Made = last[1]
        return made

    @collector_paused()
    def plan(self, items: Sequence[Item], agreement: Agreement, rank: int) -> RankPlan:
        """Return the result of `plan_rank`; the last plan itself, if the agreement and the items are equal but for the
        digests of items: the writes of a rank depend on digests only through the agreement."""

        def make() -> RankPlan:
            if agreement.world_size == 1:  # else the leader has received them
                member = next((item.member for item in items if item.member >= 0), -1)
                self.negotiator.structures = RankStructures.of([Structure.of(items)], (0,), (member,))
            return plan_rank(items, agreement, rank)

        return self.cached("plan", (without_digests(items), agreement, rank), make)

    def outliner(self, agreement: Agreement) -> Outliner:
        """Return the outliner of the leader, once it has a plan; the last one itself, if the structures of all ranks
        and the agreement are equal."""
        structures = self.negotiator.structures
        assert structures is not None  # agreed on

        def make() -> Outliner:
            return Outliner(structures, differs=agreement.differs, untied=agreement.untied, copies=agreement.copies)

        return self.cached("outliner", (id(structures), agreement), make)  # which the cached outliner keeps alive
