"""What each loop gets after a resume is what it would have got. `loader_orders.py` runs more seeds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from loader_orders import LOOPS, SAMPLERS, WAYS, Case, every_case, faults_of
from torch.utils.data import BatchSampler, Dataset, WeightedRandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

import ckptstore
from ckptstore.integrations.loaders import MapLoader
from ckptstore.state import per_rank

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.long)])
def test_every_order(way: str, num_workers: int) -> None:
    cases = [case for case in every_case() if (case.way, case.num_workers) == (way, num_workers)]
    assert len(cases) >= len(SAMPLERS) * 2
    found = [faults_of(case) for case in cases]
    assert [faults for faults, _ in found if faults] == []
    assert way != "all_state" or not any(num_warned for _, num_warned in found)


class Augmented(Dataset[float]):
    """Draws numbers for each sample, when it is made and when it is read, and counts the reads."""

    def __init__(self, labels: list[int]) -> None:
        self.labels, self.shift, self.reads = labels, torch.rand(len(labels)), 0

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> float:
        self.reads += 1
        return self.labels[index] + float(self.shift[index]) + float(torch.rand(()))


def loaders_of(data: Any) -> dict[str, Any]:
    return ckptstore.all_state(map=MapLoader(data, 4), stateful=StatefulDataLoader(data, batch_size=4, shuffle=True))


@pytest.mark.parametrize("make", [list, torch.tensor, Augmented, lambda labels: [f"/of/job/{one}" for one in labels]])
def test_another_data_set_of_the_same_length_is_noticed(
    tmp_path: Path, make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """And the same one is not taken for another: its code does not run."""
    data = make([*range(20)])
    with ckptstore.open_store(tmp_path) as store:
        state = loaders_of(data)
        for name in ("map", "stateful"):
            loader = state[name].item.loader if name == "stateful" else state[name]
            next(iter(loader))
        store.save(1, state)
        reads = getattr(data, "reads", 0)
        store.load(loaders_of(data))
        store.load(loaders_of(make([*range(20)])))
        assert not caplog.records
        assert getattr(data, "reads", 0) == reads
        store.load(loaders_of(make([*range(5, 25)])))
    assert [record.getMessage()[:50] for record in caplog.records] == [
        "the data set of a loader holds other samples than w"[:50]
    ] * 2


@pytest.mark.parametrize("mark", [per_rank, lambda loader: loader])
def test_an_order_that_nobody_keeps_is_told_of(tmp_path: Path, mark: Any, caplog: pytest.LogCaptureFixture) -> None:
    samplers = (
        WeightedRandomSampler([1.0] * 8, 8),
        BatchSampler(WeightedRandomSampler([1.0] * 8, 8), 4, drop_last=False),
    )
    loaders = (
        StatefulDataLoader(range(8), batch_size=4, sampler=samplers[0]),  # type: ignore[arg-type]
        StatefulDataLoader(range(8), batch_sampler=samplers[1]),  # type: ignore[arg-type]
    )
    with ckptstore.open_store(tmp_path) as store:
        state = {"train": [mark(loader) for loader in loaders]}
        store.save(0, state)
        assert not caplog.records, "nothing was drawn yet"
        for step in (1, 2):
            for loader in loaders:
                next(iter(loader))
            store.save(step, state)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2
    assert "at 'train.0' is saved in the middle of a pass, whose order its WeightedRandomSampler draws anew" in told[0]
    assert "at 'train.1'" in told[1]


def test_a_loop_in_another_epoch_is_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    case = Case("StatefulDataLoader", "distributed", 0, is_persistent=False, way="all_state", loop=LOOPS[0])
    with ckptstore.open_store(tmp_path) as store:
        for resumed in (False, True):
            loader = case.make()
            state = ckptstore.all_state(loader)
            store.resume(state)
            store.save(int(resumed), state)  # asks for the state before the loop
            loader.sampler.set_epoch(0 if resumed else 1)
            found = [batch.tolist() for batch in loader]
            if not resumed:
                next(iter(loader))
                store.save(2, state)
    assert len(found) == 3, "a pass of its own"
    assert "has set its sampler to another one: {'sampler.epoch': 0}, which was {'sampler.epoch': 1}" in caplog.text


def test_a_state_before_the_first_pass_begins_none(tmp_path: Path) -> None:
    loader = StatefulDataLoader(range(8), batch_size=4, shuffle=True)  # type: ignore[arg-type]
    state = ckptstore.all_state(loader)
    before = torch.get_rng_state()
    with ckptstore.open_store(tmp_path) as store:
        store.save(0, state)
        assert torch.equal(torch.get_rng_state(), before)
        list(loader)
        store.load(state)
        assert len(list(loader)) == 2
