"""What the first `save_async` of a job stalls: every turn is in a process of its own, which has no memory and no plan
left from one before. What the job imports is imported."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import ClassVar

import pytest
from ranks import run_ranks
from sizes import FULL, Take, group, turns

from ckptstore.tools.bench.case import Case, process_group
from ckptstore.tools.bench.destination import Place
from ckptstore.tools.bench.figures.report import WorkloadOutcome
from ckptstore.tools.bench.peers.base import Contender
from ckptstore.tools.bench.peers.device import FirstDefaultStaged, FirstSave, FirstSaveWarmed, footprint
from ckptstore.tools.bench.peers.limits import Memcpy
from ckptstore.tools.bench.peers.own import Ckptstore
from ckptstore.tools.bench.turns import Contest

pytestmark = pytest.mark.long

SIZE_BYTES = (1 << 30) if FULL else (8 << 20)
TRAINING_SECONDS = 3.0 if FULL else 0.0


class ResumedAtOnce(FirstSave):
    """By a job that resumed, and trains nothing before it saves."""

    name = "ckptstore, resumed"
    between_seconds: ClassVar[float] = 0.0

    def prepare(self, place: str) -> None:
        self._note = footprint(self)
        self._store = self.opened(place)
        self.store.resume(self.case.state)
        time.sleep(self.between_seconds)


class ResumedBefore(ResumedAtOnce):
    """By a job that resumed some seconds ago: its memory is made beside the training."""

    name = f"ckptstore, resumed {TRAINING_SECONDS:.0f} s before"
    between_seconds = TRAINING_SECONDS


class MemcpyThere(Memcpy):
    """A copy into memory that was written before."""

    def prepare(self, place: str) -> None:
        super().prepare(place)
        self.save(place)


KINDS: dict[str, tuple[type[Contender], dict[str, object]]] = {
    kind.name: (kind, settings)
    for kind, settings in (
        (FirstSave, {}),
        (ResumedAtOnce, {}),
        (ResumedBefore, {}),
        (FirstSaveWarmed, {}),
        (FirstDefaultStaged, {"pinned": False, "behind": False}),
        (MemcpyThere, {"threads": 1}),
    )
}
NAMES = list(KINDS) if FULL else [kind.name for kind in (ResumedBefore, FirstDefaultStaged, MemcpyThere)]


def case_at(directory: str, rank: int, world_size: int) -> Case:
    case = Case(place=Place(uri=directory), rank=rank, world_size=world_size, durable=True)
    case.make_state("tensors", SIZE_BYTES)
    return case


def saved(directory: str) -> None:
    """What a job resumes from."""
    with process_group() as (rank, world_size):
        case = case_at(directory, rank, world_size)
        with Ckptstore(case).opened(directory) as store:
            store.save(0, case.state)


def one_turn(directory: str, name: str) -> WorkloadOutcome:
    """One save of one contender."""
    kind, settings = KINDS[name]
    with process_group() as (rank, world_size):
        case = case_at(directory, rank, world_size)
        contest = Contest(case, "save", figure="blocked_seconds", tell=lambda *_: None)
        contender = kind(case, **settings)
        try:
            return WorkloadOutcome.of(name, [contest.turn(contender)], role=kind.role, family=kind.family)
        finally:
            contender.close()


@pytest.fixture(scope="module")
def resumable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store to resume from."""
    path = tmp_path_factory.mktemp("saved")
    run_ranks(1, saved, str(path), timeout_seconds=600)
    return path


@group("Stall of the first asynchronous save, in processes of their own")
@pytest.mark.parametrize("turn", turns())
@pytest.mark.parametrize("name", NAMES)
def test_first_save(take: Take, resumable: Path, tmp_path: Path, name: str, turn: int) -> None:
    if name.startswith("ckptstore, resumed"):
        shutil.copytree(resumable, tmp_path / "turn-1", copy_function=os.link)
    take(
        lambda: (run_ranks(1, one_turn, str(tmp_path), name, timeout_seconds=600)[0], SIZE_BYTES),
        figure="blocked_seconds",
    )
    shutil.rmtree(tmp_path)
