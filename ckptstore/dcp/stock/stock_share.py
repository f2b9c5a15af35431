"""The contribution of a save of a state to a checkpoint that stock DCP can read: all that saves know of stock DCP."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from ckptstore.dcp.stock.stock_pickle import StockPlace
from ckptstore.dcp.stock.stock_write import (
    MAX_CHUNKS,
    MAX_NESTED_VALUES,
    Paths,
    has_many_values,
    stock_frames,
    stock_metadata,
)
from ckptstore.runtime.collector import collector_paused
from ckptstore.state.index.tensor_index import TensorIndex
from ckptstore.state.live.flatten import FlatState
from ckptstore.state.write.agree import Agreement
from ckptstore.state.write.assignment import SaveMemo
from ckptstore.state.write.shard_files import ShardFiles

logger = logging.getLogger("ckptstore")


class StockShare:
    """One rank's share: its plain values, once more as DCP frames them, and on the leader `.metadata`."""

    def __init__(
        self,
        flat: FlatState,
        keys: Sequence[str],
        files: ShardFiles,
        agreement: Agreement,
        *,
        rank: int,
        at_any_size: bool,
    ) -> None:
        """Add the values to the files of a rank that stores those of these keys: stock readers know one value for each
        key, the lowest rank's. Unless `at_any_size`, add none if there are very many."""
        self._at_any_size = at_any_size
        self._places: Mapping[str, StockPlace] | None = None
        self._paths: dict[str, tuple[str | int, ...]] = {}
        self._is_leader = rank == 0
        mine = [key for key in keys if agreement.holders(key)[0] == rank]
        if at_any_size or not has_many_values(flat, mine):
            frames, paths = stock_frames(flat, mine)
            self._places = files.add_frames(frames)
            self._paths.update(paths)
            if rank == 0 or (agreement.classes and agreement.classes.index(agreement.classes[rank]) == rank):
                self._paths.update(flat.paths)

    def report(self) -> list[Any]:
        """Return this rank's report to the leader, in types of JSON. The leader leaves out its own paths."""
        return [self._places, {} if self._is_leader else self._paths]

    @collector_paused()
    def metadata(self, reports: Sequence[Sequence[Any]], index: TensorIndex, memo: SaveMemo) -> bytes | None:
        """Leader: return `.metadata`, from the reports of all ranks. Return None, with a warning once for a store, if
        it has more than stock readers can be expected to take."""
        found = [places for places, _ in reports if places is not None]
        is_large = len(found) < len(reports) or index.num_chunks + sum(map(len, found)) > MAX_CHUNKS
        if is_large and not self._at_any_size:
            memo.cached("warning of stock", True, _warn)
            return None
        places, paths = _joined(reports)
        wanted = index.layout_digest(), list(places.items()), [*paths.items(), *self._paths.items()]
        return memo.cached("stock metadata", wanted, lambda: stock_metadata(index, places, {**paths, **self._paths}))


def _warn() -> None:
    logger.warning(
        "torch's own DCP cannot read these checkpoints: they have more than %d chunks and plain values, or a "
        "rank has more than %d plain values in dicts and lists. stock_readable=True writes what DCP needs at "
        "any size, False never does; ckptstore reads them either way",
        MAX_CHUNKS,
        MAX_NESTED_VALUES,
    )


def _joined(reports: Sequence[Sequence[Any]]) -> tuple[dict[str, StockPlace], Paths]:
    """Return the places of all ranks' values for stock readers, and the paths of all keys of other ranks than the
    leader; the lowest rank has priority."""
    places: dict[str, StockPlace] = {}
    paths: dict[str, tuple[str | int, ...]] = {}
    for of_rank, own_paths in reversed(reports):
        places.update(of_rank)
        paths.update((key, tuple(path)) for key, path in own_paths.items())
    return places, paths
