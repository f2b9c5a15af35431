"""What a save in the background costs the steps of a training beside it, when the call that began it has returned."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from sizes import FULL, ROUNDS

from ckptstore.testing import run_ranks
from ckptstore.tools.bench.case import Case, process_group
from ckptstore.tools.bench.destination import Place
from ckptstore.tools.bench.figures.report import Sample, Workload, WorkloadOutcome
from ckptstore.tools.bench.measure import Meter
from ckptstore.tools.bench.peers.base import Contender
from ckptstore.tools.bench.peers.dcp import AsyncDcp, AsyncDcpProcess
from ckptstore.tools.bench.peers.own import AsyncCkptstore
from ckptstore.tools.bench.turns import Contest

SIZE_BYTES = (2 << 30) if FULL else (8 << 20)
ALONE_SECONDS = 1.0 if FULL else 0.1
LEAST_SECONDS = 0.001
"""Less counts as much: steps vary by more, and a ratio to nothing says nothing."""


class Slowdown(Contest):
    """The total seconds are those that the steps take longer, in sum. Steps are products of matrices by one thread."""

    def timed(self, contender: Contender, call: Callable[[], Any]) -> Sample:
        """Steps alone, the call, and steps until all is stored."""
        left, right = torch.randn(512, 512), torch.randn(512, 512)

        def steps_while(going_on: Callable[[], bool]) -> tuple[int, float]:
            count, started = 0, time.perf_counter()
            while going_on():
                for _ in range(4):
                    torch.mm(left, right)
                sum(range(2000))  # a training runs Python too
                count += 1
            return count, time.perf_counter() - started

        end = time.perf_counter() + ALONE_SECONDS
        count, seconds = steps_while(lambda: time.perf_counter() < end)
        alone = seconds / count
        with Meter() as meter:
            waiting = threading.Thread(target=call())
            meter.returned()
            waiting.start()
            count, seconds = steps_while(waiting.is_alive)
            waiting.join()
        return replace(meter.sample(), total_seconds=max(LEAST_SECONDS, seconds - count * alone))


def slowdowns(directory: str) -> list[WorkloadOutcome]:
    """One process of a training."""
    with process_group() as (rank, world_size):
        torch.set_num_threads(1)
        case = Case(place=Place(uri=directory), rank=rank, world_size=world_size, durable=True)
        case.make_state("tensors", SIZE_BYTES)
        contest = Slowdown(case, "save", figure="total_seconds", tell=lambda *_: None)
        contenders: list[type[Contender]] = [AsyncCkptstore, AsyncDcp]
        return contest.run([*contenders, AsyncDcpProcess] if FULL else contenders, repeat=ROUNDS)


def test_slowdown(tell: Callable[[Workload], None], tmp_path: Path) -> None:
    (outcomes,) = run_ranks(1, slowdowns, str(tmp_path), timeout_seconds=1800)
    assert [one.reason for one in outcomes if one.status != "measured"] == []
    title = "Seconds that a training loses to one save in the background"
    tell(Workload(name="", title=title, size_bytes=SIZE_BYTES, ranks=1, outcomes=tuple(outcomes)))
