"""The turns of a contest: all contenders in each round, and not always the same one after the same one."""

from __future__ import annotations

from pathlib import Path

from ckptstore.tools.bench.case import Case
from ckptstore.tools.bench.destination import Place
from ckptstore.tools.bench.peers.base import Contender
from ckptstore.tools.bench.turns import Contest

NAMES = ("a", "b", "c")


def contender(name: str) -> type[Contender]:
    return type(name, (Contender,), {"name": name, "family": name, "save": lambda self, place: None})


def turns(path: Path, *, repeat: int) -> list[str]:
    told: list[str] = []
    case = Case(place=Place(uri=str(path)), rank=0, world_size=1, durable=False)
    contest = Contest(case, "save", figure="total_seconds", tell=lambda text, _total: told.append(text))
    outcomes = contest.run([contender(name) for name in NAMES], repeat=repeat)
    assert [(one.name, len(one.samples), one.reason) for one in outcomes] == [(name, repeat, None) for name in NAMES]
    return told[len(NAMES) :]


def test_each_round_has_an_order_of_its_own_the_same_in_every_process(tmp_path: Path) -> None:
    told = turns(tmp_path, repeat=8)
    rounds = [tuple(told[start : start + len(NAMES)]) for start in range(0, len(told), len(NAMES))]
    assert all(sorted(one) == [*NAMES] for one in rounds)
    assert {one[0] for one in rounds} == {*NAMES}
    assert turns(tmp_path, repeat=8) == told
