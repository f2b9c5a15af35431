"""What a save would work out again though nothing has changed: kept from one save of a store to the next.

A training saves the same structure again and again. All that is kept here follows from keys, dtypes, shapes and places
alone, and is used only where these are equal. It holds no tensor of the state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckptstore.runtime.collector import collector_paused
from ckptstore.state.index.items import Item
from ckptstore.state.index.tensor_index import TensorIndex
from ckptstore.state.write.agree import Agreement, Negotiator
from ckptstore.state.write.assignment import RankPlan, plan_rank
from ckptstore.state.write.stock_pickle import StockPlace
from ckptstore.state.write.stock_write import Paths, stock_metadata


@dataclass(slots=True)
class SaveMemo:
    """Of one store in one process, for one save at a time."""

    negotiator: Negotiator = field(default_factory=Negotiator)
    _planned_for: tuple[Any, ...] | None = None
    _plan: RankPlan | None = None
    _stock_of: tuple[Any, ...] | None = None
    _stock: bytes = b""

    @collector_paused()
    def plan(self, items: Sequence[Item], agreement: Agreement, rank: int) -> RankPlan:
        """`plan_rank`; the last plan itself, where it is of equal items and an equal agreement."""
        wanted = items, agreement, rank
        if self._plan is None or self._planned_for != wanted:
            self._plan = plan_rank(items, agreement, rank)
            self._planned_for = wanted
        return self._plan

    @collector_paused()
    def stock_metadata(self, index: TensorIndex, places: Mapping[str, StockPlace], paths: Paths) -> bytes:
        """`stock_metadata`; the last bytes, where the index differs in digests and plain values alone."""
        wanted = index.layout_digest(), list(places.items()), list(paths.items())
        if self._stock_of != wanted:
            self._stock = stock_metadata(index, places, paths)
            self._stock_of = wanted
        return self._stock
