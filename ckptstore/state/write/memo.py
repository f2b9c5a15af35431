"""What a save would work out again though nothing has changed: kept from one save of a store to the next.

A training saves the same structure again and again. All that is kept here follows from keys, dtypes, shapes and places
alone, and is used only where these are equal. It holds no tensor of the state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckptstore.runtime.collector import collector_paused
from ckptstore.state.index.items import Item, Structure, without_digests
from ckptstore.state.index.tensor_index import TensorIndex
from ckptstore.state.write.agree import Agreement, Negotiator
from ckptstore.state.write.assignment import RankPlan, plan_rank
from ckptstore.state.write.outlining import Outliner, Structures
from ckptstore.state.write.stock_pickle import StockPlace
from ckptstore.state.write.stock_write import Paths, stock_metadata


@dataclass(slots=True)
class SaveMemo:
    """Of one store in one process, for one save at a time."""

    negotiator: Negotiator = field(default_factory=Negotiator)
    _plan: tuple[Any, RankPlan] | None = None
    """What a plan was made for, and the plan: one assignment, so that no error comes between the two."""
    _outliner: tuple[Structures, Agreement, Outliner] | None = None
    _stock: tuple[Any, bytes] | None = None
    has_warned_of_stock: bool = False
    """Whether it was said that stock DCP cannot read the checkpoints of this store: that is said once."""
    _turn: int = 0

    def next_turn(self) -> int:
        """Another number for each save of this process: which copies it looks at."""
        self._turn += 1
        return self._turn

    @collector_paused()
    def plan(self, items: Sequence[Item], agreement: Agreement, rank: int) -> RankPlan:
        """`plan_rank`; the last plan itself, where the agreement is equal and the items are, but for their digests:
        what a rank writes depends on these by what was agreed alone."""
        wanted = without_digests(items), agreement, rank
        last = self._plan
        if last is None or last[0] != wanted:
            last = self._plan = wanted, plan_rank(items, agreement, rank)
            if agreement.world_size == 1:  # else the leader has heard of them
                member = next((item.member for item in items if item.member >= 0), -1)
                self.negotiator.structures = Structures.of([Structure.of(items)], (0,), (member,))
        return last[1]

    @collector_paused()
    def outliner(self, agreement: Agreement) -> Outliner:
        """What makes the outline, on the leader, once it has a plan; the last one itself where the structures of all
        ranks and the agreement are equal."""
        structures, last = self.negotiator.structures, self._outliner
        assert structures is not None  # agreed on
        if last is None or last[0] is not structures or last[1] != agreement:
            found = Outliner(structures, differs=agreement.differs, untied=agreement.untied, copies=agreement.copies)
            last = self._outliner = structures, agreement, found
        return last[2]

    @collector_paused()
    def stock_metadata(self, index: TensorIndex, places: Mapping[str, StockPlace], paths: Paths) -> bytes:
        """`stock_metadata`; the last bytes, where the index differs in digests and plain values alone."""
        wanted = index.layout_digest(), list(places.items()), list(paths.items())
        last = self._stock
        if last is None or last[0] != wanted:
            last = self._stock = wanted, stock_metadata(index, places, paths)
        return last[1]
