"""What the first `save_async` of a job stalls: every turn is in a process of its own, which has no memory and no plan
left from one before. What the job imports is imported."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import ClassVar

from sizes import FULL, ROUNDS

from ckptstore.testing import run_ranks
from ckptstore.tools.bench.case import Case, process_group
from ckptstore.tools.bench.destination import Place
from ckptstore.tools.bench.figures.report import Sample, Workload, WorkloadOutcome
from ckptstore.tools.bench.gpu.first_saves import FirstDefaultStaged, FirstSave, FirstSaveWarmed, footprint
from ckptstore.tools.bench.peers.base import Contender
from ckptstore.tools.bench.peers.limits import Memcpy
from ckptstore.tools.bench.peers.own import Ckptstore
from ckptstore.tools.bench.turns import Contest

_FIGURE = "blocked_seconds"
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


def turn(directory: str, name: str) -> Sample:
    """One save of one contender."""
    kind, settings = KINDS[name]
    with process_group() as (rank, world_size):
        case = case_at(directory, rank, world_size)
        contest = Contest(case, "save", figure=_FIGURE, tell=lambda *_: None)
        contender = kind(case, **settings)
        try:
            return contest.turn(contender)
        finally:
            contender.close()


def test_first_save(tell: Callable[[Workload], None], tmp_path: Path) -> None:
    run_ranks(1, saved, str(tmp_path / "saved"), timeout_seconds=600)
    samples: dict[str, list[Sample]] = {name: [] for name in NAMES}
    for number in range(ROUNDS):
        for name in Random(number).sample(NAMES, len(NAMES)):
            place = tmp_path / "turn"
            if name.startswith("ckptstore, resumed"):
                shutil.copytree(tmp_path / "saved", place / "turn-1", copy_function=os.link)
            place.mkdir(exist_ok=True)
            (sample,) = run_ranks(1, turn, str(place), name, timeout_seconds=600)
            samples[name].append(sample)
            shutil.rmtree(place)
    outcomes = tuple(
        WorkloadOutcome.of(name, found, role=KINDS[name][0].role, family=KINDS[name][0].family)
        for name, found in samples.items()
    )
    title = "Stall of the first asynchronous save, in processes of their own"
    tell(Workload(name="", title=title, size_bytes=SIZE_BYTES, ranks=1, outcomes=outcomes, figure=_FIGURE))
