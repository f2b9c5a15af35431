"""Rank processes that wait for orders: the test says whose turn it is, and gets what the turn measured."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from multiprocessing.connection import Client, Connection, Listener

from ckptstore.tools.bench.case import process_group
from ckptstore.tools.bench.figures.report import WorkloadOutcome
from ckptstore.tools.bench.run import in_ranks
from ckptstore.tools.bench.turns import Contest, Entrant
from ckptstore.tools.bench.work import Task, case_of

_STARTER = ThreadPoolExecutor(1)
"""One thread for all of them, which lasts: processes that it starts end with it."""


class Ranks:
    """The processes of one contest. A contender chooses its settings before its first turn."""

    def __init__(self, line: Connection) -> None:
        self._line = line

    def turn(self, name: str) -> tuple[WorkloadOutcome, int]:
        """Have a contender take a turn. Return its outcome, with at most one sample, and the bytes that it moved."""
        self._line.send(name)
        found: tuple[WorkloadOutcome, int] = self._line.recv()
        return found


@contextmanager
def ranks_of(task: Task, contest: type[Contest] = Contest) -> Iterator[Ranks]:
    """Start the ranks of a task, and end them. Raises RanksFailed when one of them dies."""
    with Listener(family="AF_UNIX") as listener:
        address = str(listener.address)

        def run() -> None:
            try:
                in_ranks(task, task.options.ranks, take_orders, task, contest, address)
            finally:
                with suppress(OSError), Client(address):
                    pass  # wakes up who waits for ranks that have not come

        ended = _STARTER.submit(run)
        with listener.accept() as line:
            try:
                yield Ranks(line)
                line.send(None)
            except (EOFError, BrokenPipeError):
                ended.result()
                raise
        ended.result()


def take_orders(task: Task, kind: type[Contest], address: str) -> None:
    """Take a turn for each name that the test sends, as one of the ranks; the first one answers for all."""
    warnings.simplefilter("ignore")
    with process_group() as (rank, world_size), Client(address) if rank == 0 else nullcontext() as line:
        case = case_of(task, rank, world_size)
        contest = kind(case, task.table.action, figure=task.table.figure, tell=lambda *_: None)
        kinds, entrants = {one.name: one for one in task.table.contenders}, dict[str, Entrant]()
        while name := case.gather(line and line.recv())[0]:
            if name not in entrants:
                entrants[name] = contest.enter(kinds[name])
            entrants[name].outcome = replace(entrants[name].outcome, samples=())
            contest.take(entrants[name])
            outcomes, rank_bytes = zip(*case.gather((entrants[name].outcome, case.rank_bytes)), strict=True)
            if line:
                line.send((WorkloadOutcome.over_ranks(outcomes), task.moved_bytes(rank_bytes)))
        for entrant in entrants.values():
            contest.leave(entrant)
