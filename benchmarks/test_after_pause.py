"""Saves without fsync after some seconds without work, as in a training: a host may have taken free memory back."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from sizes import FULL, ROUNDS

from ckptstore.testing import run_ranks
from ckptstore.tools.bench.case import Case, process_group
from ckptstore.tools.bench.destination import Place
from ckptstore.tools.bench.figures.report import Workload, WorkloadOutcome
from ckptstore.tools.bench.peers.base import Contender
from ckptstore.tools.bench.peers.dcp import Dcp
from ckptstore.tools.bench.peers.own import KeptCkptstore
from ckptstore.tools.bench.peers.torch_checkpointing import TorchCheckpointing
from ckptstore.tools.bench.turns import Contest

SIZE_BYTES = (1 << 30) if FULL else (8 << 20)
PAUSE_SECONDS = 4.0 if FULL else 0.0


def rested(kind: type[Contender]) -> type[Contender]:
    """The same, and nothing happens for some seconds before each turn."""

    def prepare(self: Contender, place: str) -> None:
        kind.prepare(self, place)
        time.sleep(PAUSE_SECONDS)

    return type(kind.__name__, (kind,), {"prepare": prepare})


def saves(directory: str) -> list[WorkloadOutcome]:
    """One process."""
    with process_group() as (rank, world_size):
        case = Case(place=Place(uri=directory), rank=rank, world_size=world_size, durable=False)
        case.make_state("tensors", SIZE_BYTES)
        contest = Contest(case, "save", figure="total_seconds", tell=lambda *_: None)
        return contest.run([rested(kind) for kind in (KeptCkptstore, Dcp, TorchCheckpointing)], repeat=ROUNDS)


def test_after_pause(tell: Callable[[Workload], None], tmp_path: Path) -> None:
    (outcomes,) = run_ranks(1, saves, str(tmp_path), timeout_seconds=1800)
    assert [one.reason for one in outcomes if one.status != "measured"] == []
    title = f"Save without fsync after {PAUSE_SECONDS:.0f} seconds without work"
    tell(Workload(name="", title=title, size_bytes=SIZE_BYTES, ranks=1, outcomes=tuple(outcomes)))
