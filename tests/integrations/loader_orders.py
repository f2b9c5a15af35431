"""The order of samples after a resume, by seed, against that of a run that never ended.

A case is a kind of sampler in a kind of loader, a way into the state, and a loop as users write them. Its run saves at
each step, after each epoch and after each `break`; then each save is resumed by new objects in a process whose random
numbers are others. What follows has to be what followed, or a warning has to say that it is not:

    python tests/integrations/loader_orders.py 0 500
"""

from __future__ import annotations

import logging
import random
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice, product
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

import ckptstore
from ckptstore.errors import CkptstoreError
from ckptstore.integrations.loaders import MapLoader, StreamLoader
from ckptstore.state import per_rank

SIZE, BATCH, EPOCHS = 10, 4, 3
WORKERS = (0, 2)
WAYS = ("all_state", "per_rank", "plain")
LOOPS = ("counts epochs", "counts batches", "asks the loader")
"""Who knows where the run is: a number that goes up after each epoch, the number of steps, or the loader."""


class EagerSampler(Sampler[int]):
    """Draws its order from numpy, at `iter`."""

    def __iter__(self) -> Iterator[int]:
        return iter(np.random.permutation(SIZE).tolist())

    def __len__(self) -> int:
        return SIZE


class LateSampler(EagerSampler):
    """Draws its order from Python, with the first sample."""

    def __iter__(self) -> Iterator[int]:
        yield from random.sample(range(SIZE), SIZE)


class EpochSampler(EagerSampler):
    """Is told the epoch, and has an order for each."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(random.Random(self.epoch).sample(range(SIZE), SIZE))


class CountingSampler(EpochSampler):
    """Counts the epochs itself."""

    set_epoch = None  # type: ignore[assignment]

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        return super().__iter__()


class StatefulSampler(EagerSampler):
    """Keeps its order in its state."""

    def __init__(self) -> None:
        self.order: list[int] = []
        self.given, self.is_loaded = 0, False

    def __iter__(self) -> Iterator[int]:
        if not self.is_loaded:
            self.order, self.given = torch.randperm(SIZE).tolist(), 0
        self.is_loaded = False
        while self.given < SIZE:
            self.given += 1
            yield self.order[self.given - 1]

    def state_dict(self) -> dict[str, Any]:
        return {"order": self.order, "given": self.given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order, self.given, self.is_loaded = state["order"], state["given"], True


def _seeded() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def _distributed() -> DistributedSampler[int]:
    return DistributedSampler(range(2 * SIZE), num_replicas=2, rank=1, seed=3)  # type: ignore[arg-type]


def _stateful_distributed() -> Any:
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    return StatefulDistributedSampler(range(2 * SIZE), num_replicas=2, rank=1, seed=3)  # type: ignore[arg-type]


SAMPLERS: dict[str, Callable[[], dict[str, Any]]] = {
    "sequential": lambda: {"batch_size": BATCH},
    "shuffled": lambda: {"batch_size": BATCH, "shuffle": True},
    "shuffled, generator": lambda: {"batch_size": BATCH, "shuffle": True, "generator": _seeded()},
    "random": lambda: {"batch_size": BATCH, "sampler": RandomSampler(range(SIZE))},
    "random, generator": lambda: {"batch_size": BATCH, "sampler": RandomSampler(range(SIZE), generator=_seeded())},
    "weighted": lambda: {"batch_size": BATCH, "sampler": WeightedRandomSampler([1.0] * SIZE, SIZE)},
    "weighted, generator": lambda: {
        "batch_size": BATCH,
        "sampler": WeightedRandomSampler([1.0] * SIZE, SIZE, generator=_seeded()),
    },
    "subset": lambda: {"batch_size": BATCH, "sampler": SubsetRandomSampler(range(SIZE))},
    "distributed": lambda: {"batch_size": BATCH, "sampler": _distributed()},
    "stateful distributed": lambda: {"batch_size": BATCH, "sampler": _stateful_distributed()},
    "batches of random": lambda: {"batch_sampler": BatchSampler(RandomSampler(range(SIZE)), BATCH, drop_last=False)},
    "batches of distributed": lambda: {"batch_sampler": BatchSampler(_distributed(), BATCH, drop_last=False)},
    "own, eager": lambda: {"batch_size": BATCH, "sampler": EagerSampler()},
    "own, late": lambda: {"batch_size": BATCH, "sampler": LateSampler()},
    "own, epochs": lambda: {"batch_size": BATCH, "sampler": EpochSampler()},
    "own, counting": lambda: {"batch_size": BATCH, "sampler": CountingSampler()},
    "own, stateful": lambda: {"batch_size": BATCH, "sampler": StatefulSampler()},
}
"""The options of a StatefulDataLoader."""
OWN = ("not told", "told")
"""Whether the loop tells a MapLoader or StreamLoader the epoch."""
DRAWN = {name for name in SAMPLERS if name.split(",")[0] in ("random", "weighted", "subset", "batches of random")}
"""Whose order is drawn from what only all_state keeps. The project knows these by their classes."""
OWN_DRAWN = {"own, eager", "own, late", "own, counting"}
"""Likewise, and nobody can know it: the states of all_state alone are exact."""
NEXT_DRAWN = DRAWN | {"own, stateful"}
"""Of which the rest of an epoch is known, and those after it are drawn from numbers that all_state alone keeps."""


def read(name: str, start: int) -> Iterator[int]:
    """The samples of a stream; that of c is empty."""
    yield from range(100 * (name == "b") + start, 0 if name == "c" else 100 * (name == "b") + 5)


@dataclass(frozen=True)
class Case:
    """One combination. `sampler` is for a StatefulDataLoader; the other loaders make their own order."""

    loader: str
    sampler: str
    num_workers: int
    is_persistent: bool
    way: str
    loop: str

    def make(self) -> Any:
        """Return a new loader, as a new process has it."""
        if self.loader == "MapLoader":
            return MapLoader(list(range(SIZE)), BATCH, seed=3, num_workers=self.num_workers)
        if self.loader == "StreamLoader":
            return StreamLoader(["a", "b", "c"], read, BATCH, seed=3, num_workers=self.num_workers)
        from torchdata.stateful_dataloader import StatefulDataLoader

        options = {"num_workers": self.num_workers, "persistent_workers": self.is_persistent}
        return StatefulDataLoader(range(2 * SIZE), **SAMPLERS[self.sampler](), **options)  # type: ignore[arg-type]


def case_of(seed: int) -> Case:
    """Return the case of a seed."""
    rng = random.Random(seed)
    loader = rng.choices(["StatefulDataLoader", "MapLoader", "StreamLoader"], [4, 1, 1])[0]
    is_stateful = loader == "StatefulDataLoader"
    workers = rng.choice(WORKERS)
    is_persistent = is_stateful and workers > 0 and rng.random() < 0.5
    sampler = rng.choice([*SAMPLERS] if is_stateful else OWN)
    return Case(loader, sampler, workers, is_persistent, rng.choice(WAYS), rng.choice(LOOPS[: 2 + (not is_stateful)]))


def every_case() -> list[Case]:
    """Return all combinations."""
    found = []
    for workers, way, loop in product(WORKERS, WAYS, LOOPS):
        for kind, own in product(("MapLoader", "StreamLoader"), OWN):
            found.append(Case(kind, own, workers, is_persistent=False, way=way, loop=loop))
        for sampler, persistent in product(SAMPLERS, {False, workers > 0}) if loop != LOOPS[2] else ():
            found.append(Case("StatefulDataLoader", sampler, workers, persistent, way, loop))
    return found


Trace = list[tuple[int, tuple[int, ...], float]]
"""For each step the epoch of the loop, the samples, and a number that the training drew."""


class Words(logging.Handler):
    """Collects what the project warns of."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.words: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.words.append(record.getMessage())


def steps_of_epoch(case: Case) -> int:
    return sum(1 for _ in case.make())


def run(case: Case, store: ckptstore.CheckpointStore, *, at: int | None = None, saves: bool = False) -> Trace:
    """Train to the end, from the save `at` if it is given; return what was trained on."""
    num_steps = steps_of_epoch(case)
    for seed_all in (torch.manual_seed, np.random.seed, random.seed):
        seed_all(1 if at is None else 77)
    loader = case.make()
    state: dict[str, Any] = {"epoch": 0, "step": 0, "saved": -1}
    if case.way == "all_state":
        state = ckptstore.all_state(loader=loader, **state)
    else:
        state["loader"] = per_rank(loader) if case.way == "per_rank" else loader
    if at is not None:
        store[at].load(state)
    trace: Trace = []

    def save() -> None:
        state["saved"] += 1
        if saves:
            store.save(state["saved"], state)

    while (loader.epoch if case.loop == "asks the loader" else state["epoch"]) < EPOCHS:
        if case.loop != "asks the loader":
            _set_epoch(case, loader, state["epoch"])
        left = num_steps - state["step"] % num_steps if case.loop == "counts batches" else None
        for batch in islice(loader, left):
            drawn = torch.rand(()).item() + random.random() + float(np.random.rand())
            trace.append((state["epoch"], tuple(batch.tolist()), drawn))
            state["step"] += 1
            if case.loop == "counts batches":
                state["epoch"] = state["step"] // num_steps
            save()
        if case.loop == "counts epochs":
            state["epoch"] += 1
        save()
    return trace


def _set_epoch(case: Case, loader: Any, epoch: int) -> None:
    """Tell the loader or its samplers the epoch, where a loop with them does."""
    if case.loader == "StatefulDataLoader":
        for part in (loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)):
            if callable(getattr(part, "set_epoch", None)):
                part.set_epoch(epoch)
    elif case.sampler == "told":
        loader.set_epoch(epoch)


@dataclass(frozen=True)
class Fault:
    """A save of a case after which others samples came than in the run that never ended, and no word of it."""

    case: Case
    save: int
    expected: Trace
    got: Trace | str


def faults_of(case: Case) -> tuple[list[Fault], int]:
    """Return the faults of a case, and after how many of its saves a warning said that the samples are others."""
    heard = Words()
    logger = logging.getLogger("ckptstore")
    logger.addHandler(heard)
    faults: list[Fault] = []
    num_warned = 0
    try:
        with tempfile.TemporaryDirectory() as root, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with ckptstore.open_store(root) as store:
                whole = run(case, store, saves=True)
                warned_at_save = bool(heard.words)
                num_steps = len(whole) // EPOCHS
                for number, step in enumerate(_steps_of_saves(num_steps)):
                    heard.words.clear()
                    expected = whole[step:]
                    try:
                        got: Trace | str = run(case, store, at=number)
                    except CkptstoreError as error:
                        got = str(error)
                    in_middle = bool(step % num_steps)
                    if _same(case, expected, got, step, num_steps):
                        continue
                    if heard.words or (warned_at_save and in_middle):
                        num_warned += 1
                    else:
                        faults.append(Fault(case, number, expected, got))
    finally:
        logger.removeHandler(heard)
    return faults, num_warned


def _steps_of_saves(num_steps: int) -> list[int]:
    """Return how many steps were done at each save: one in each step, and one after each epoch."""
    return [
        step
        for epoch in range(EPOCHS)
        for step in [*range(epoch * num_steps + 1, (epoch + 1) * num_steps + 1), (epoch + 1) * num_steps]
    ]


def _same(case: Case, expected: Trace, got: Trace | str, step: int, num_steps: int) -> bool:
    if isinstance(got, str):
        return False
    if case.way == "all_state":
        return got == expected
    if case.sampler in NEXT_DRAWN | OWN_DRAWN:
        rest = -step % num_steps if case.sampler in NEXT_DRAWN else 0
        return len(got) == len(expected) and [one[:2] for one in got[:rest]] == [one[:2] for one in expected[:rest]]
    return [one[:2] for one in got] == [one[:2] for one in expected]


def main(first: int, last: int) -> int:
    """Run the cases of some seeds, print their faults, and return how many have one."""
    num_faulty = 0
    for seed in range(first, last):
        faults, num_warned = faults_of(case := case_of(seed))
        num_faulty += bool(faults)
        if faults or num_warned:
            print(seed, case, f"warned {num_warned}", *faults[:1], sep="\n   ")
    print(f"{num_faulty} of {last - first} cases have a fault")
    return num_faulty


if __name__ == "__main__":
    sys.exit(bool(main(int(sys.argv[1]), int(sys.argv[2]))))
