"""Some ranks are throttled for minutes while the others wait: all of them know what became of the save before the
watchdog of NCCL, which knows no reason, ends the job 600 s after the first rank waits for the others."""

from __future__ import annotations

import pytest
from kit.simulation import Action, Actor, Plan, Simulation, Trouble, report
from kit.simulation.world import Attempted, World

from ckptstore.config import RetryConfig, StoreConfig
from ckptstore.errors import CkptstoreError

pytestmark = pytest.mark.slow

WATCHDOG_SECONDS = 600.0
RANKS = 4


def save_of(
    simulation: Simulation, *, board: str, who: int, what: str, minutes: float, at_call: int
) -> list[Attempted]:
    """How the second save of a job ended on each rank, with the default deadlines."""
    saves = Action("directory", step=10), Action("directory", step=20)
    plan = Plan(
        1,
        board=board,
        rank_timeout_seconds=StoreConfig(retry=RetryConfig()).rank_timeout_seconds,
        retry_attempts=RetryConfig().retry_attempts,
        actors=(Actor("job1", saves, ranks=RANKS),),
        troubles=(Trouble("outage", f"job1.{who}", at_call=at_call, seconds=60 * minutes, what=what),),
    )
    worlds: list[World] = []
    outcome = simulation.run(plan, prepare=worlds.append)
    assert outcome.ok, report(outcome)
    assert any("[throttled]" in line for line in outcome.trace)
    attempts = worlds[0].attempts["job1", 1]
    return [attempts[rank] for rank in range(RANKS)]


@pytest.mark.parametrize(
    ("board", "who", "what", "at_call"),
    [
        *((board, 0, what, 31) for board in ("torch", "storage") for what in ("checkpoints/", "log/", "")),
        *(("storage", 2, what, 27) for what in ("checkpoints/", "")),
        *(("torch", 2, what, 3) for what in ("checkpoints/", "")),
        *(("storage", 2, "", at_call) for at_call in (16, 23, 30)),  # while it reads a result, posts an answer, stores
        *(("storage", 0, "", at_call) for at_call in range(20, 45, 4)),
        *(("torch", 0, "", at_call) for at_call in (20, 28, 40, 44)),  # the last of them while it commits
    ],
)
def test_throttled_for_an_hour_the_save_fails_everywhere_in_time(
    simulation: Simulation, board: str, who: int, what: str, at_call: int
) -> None:
    ranks = save_of(simulation, board=board, who=who, what=f"throttled {what}", minutes=60, at_call=at_call)
    assert all(isinstance(rank.error, CkptstoreError) for rank in ranks), ranks
    began = min(rank.began for rank in ranks)
    assert all(rank.ended is not None and rank.ended - began < WATCHDOG_SECONDS for rank in ranks), ranks


@pytest.mark.parametrize(("board", "who", "at_call"), [("torch", 0, 31), ("storage", 2, 27)])
def test_throttled_for_two_minutes_the_save_completes(
    simulation: Simulation, board: str, who: int, at_call: int
) -> None:
    ranks = save_of(simulation, board=board, who=who, what="throttled checkpoints/", minutes=2, at_call=at_call)
    assert [rank.error for rank in ranks] == [None] * RANKS
    assert all(rank.ended is not None and rank.ended - rank.began > 100 for rank in ranks)
