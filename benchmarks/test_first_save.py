"""What the first `save_async` of a store stalls, when nothing is kept from one before: no memory, no plan."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from sizes import FULL, ROUNDS

from ckptstore.bench.case import Case, process_group
from ckptstore.bench.destination import Place
from ckptstore.bench.figures.report import Workload, WorkloadOutcome
from ckptstore.bench.gpu.first_saves import FirstDefaultStaged, FirstSave, FirstSaveResumed, FirstSaveWarmed
from ckptstore.bench.peers.limits import Memcpy
from ckptstore.bench.turns import Contest
from ckptstore.testing import run_ranks

_FIGURE = "blocked_seconds"
SIZE_BYTES = (1 << 30) if FULL else (8 << 20)


def first_saves(directory: str) -> list[WorkloadOutcome]:
    """One process; what it imports is there already."""
    with process_group() as (rank, world_size):
        case = Case(place=Place(uri=directory), rank=rank, world_size=world_size, durable=True)
        case.make_state("tensors", SIZE_BYTES)
        contest = Contest(case, "save", figure=_FIGURE, tell=lambda *_: None)
        return contest.run([FirstSave, FirstSaveWarmed, FirstSaveResumed, FirstDefaultStaged, Memcpy], repeat=ROUNDS)


def test_first_save(tell: Callable[[Workload], None], tmp_path: Path) -> None:
    (outcomes,) = run_ranks(1, first_saves, str(tmp_path), timeout_seconds=1800)
    assert [one.reason for one in outcomes if one.status != "measured"] == []
    title = "Stall of the first asynchronous save"
    found = Workload(name="", title=title, size_bytes=SIZE_BYTES, ranks=1, outcomes=tuple(outcomes), figure=_FIGURE)
    tell(found)
