"""What a save in the background costs the steps of a training beside it, when the call that began it has returned."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from orders import Ranks, ranks_of
from ranks import run_ranks
from sizes import FULL, Take, group, turns

from ckptstore.tools.bench.case import Case
from ckptstore.tools.bench.destination import Place
from ckptstore.tools.bench.figures.report import Options, Sample
from ckptstore.tools.bench.measure import Meter
from ckptstore.tools.bench.peers.base import Contender
from ckptstore.tools.bench.peers.dcp import AsyncDcp, AsyncDcpProcess
from ckptstore.tools.bench.peers.own import AsyncCkptstore
from ckptstore.tools.bench.turns import Contest, Tell
from ckptstore.tools.bench.work import Task

pytestmark = pytest.mark.long

SIZE_BYTES = (2 << 30) if FULL else (8 << 20)
ALONE_SECONDS = 1.0 if FULL else 0.1
LEAST_SECONDS = 0.001
"""Less counts as much: steps vary by more, and a ratio to nothing says nothing."""


class Slowdown(Contest):
    """The total seconds are those that the steps take longer, in sum. Steps are products of matrices by one thread."""

    def __init__(self, case: Case, action: str, *, figure: str, tell: Tell) -> None:
        super().__init__(case, action, figure="total_seconds", tell=tell)
        torch.set_num_threads(1)

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


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    options = Options(workloads=("async",), shape="tensors", size_bytes=SIZE_BYTES)
    place = Place(uri=str(tmp_path_factory.mktemp("slowdown")))
    task = Task(name="async", options=options, place=place, size_bytes=SIZE_BYTES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ckptstore.tools.bench.run.run_ranks", run_ranks)
        with ranks_of(task, Slowdown) as found:
            yield found


@group("Seconds that a training loses to one save in the background")
@pytest.mark.parametrize("turn", turns())
@pytest.mark.parametrize(
    "name", [kind.name for kind in (AsyncCkptstore, AsyncDcp, *([AsyncDcpProcess] if FULL else []))]
)
def test_slowdown(take: Take, ranks: Ranks, name: str, turn: int) -> None:
    take(lambda: (ranks.turn(name)[0], 0))  # no bytes: what is timed are steps
