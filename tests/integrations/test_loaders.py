"""Loaders that resume on another number of ranks: what the loops of all ranks are given, sample by sample."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_ranks import run_ranks
from hypothesis import given
from hypothesis import strategies as st
from thread_ranks import run_threads
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

import ckptstore
from ckptstore.errors import InvalidInput, InvalidState, StateMismatch
from ckptstore.integrations.loaders import MapLoader, StreamLoader
from ckptstore.state import per_rank

pytestmark = pytest.mark.slow

SIZES = {"a.0": 7, "a.1": 1, "b": 0, "c/d": 12, "e": 5, "f": 9, "g": 30}
"""Samples of each stream. Names have what keys of a state are joined by."""


class Numbers(Dataset[int]):
    """Sample n is the number n."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> int:
        return index


def read_stream(name: str, start: int) -> Iterator[str]:
    """The samples of a stream from one on, each with its own name."""
    yield from (f"{name}#{number}" for number in range(start, SIZES[name]))


def everything() -> Counter[str]:
    return Counter(sample for name in SIZES for sample in read_stream(name, 0))


def map_loaders(size: int, num_ranks: int, batch_size: int, **options: Any) -> list[MapLoader]:
    return [
        MapLoader(Numbers(size), batch_size, rank=rank, world_size=num_ranks, **options) for rank in range(num_ranks)
    ]


def stream_loaders(num_ranks: int, batch_size: int, names: Any = (*SIZES,), **options: Any) -> list[StreamLoader]:
    options |= {"world_size": num_ranks, "collate_fn": list}
    return [StreamLoader([*names], read_stream, batch_size, rank=rank, **options) for rank in range(num_ranks)]


phases = st.lists(st.tuples(st.integers(1, 7), st.integers(1, 5), st.integers(0, 6)), min_size=1, max_size=4)
"""Numbers of ranks, the batch sizes, and how many batches each rank takes; the last one ends the epoch."""


@given(size=st.integers(1, 60), phases=phases, shuffle=st.booleans(), drop_last=st.booleans(), epoch=st.integers(0, 2))
def test_each_sample_comes_once_on_any_numbers_of_ranks(
    size: int, phases: list[tuple[int, int, int]], shuffle: bool, drop_last: bool, epoch: int
) -> None:
    state: Any = None
    seen: Counter[int] = Counter()
    twice = 0
    for number, (num_ranks, batch_size, num_batches) in enumerate(phases):
        if drop_last and size < num_ranks * batch_size:
            with pytest.raises(
                InvalidInput, match=rf"{size} samples make no batch of {batch_size} on {num_ranks} ranks"
            ):
                map_loaders(size, num_ranks, batch_size, drop_last=True)
            return
        loaders = map_loaders(size, num_ranks, batch_size, shuffle=shuffle, drop_last=drop_last, seed=5)
        for loader in loaders:
            loader.set_epoch(epoch)
            if state is not None:
                loader.load_rank_states([state] * 3)
        before = loaders[0].state_dict()["consumed"]
        is_last = number == len(phases) - 1
        taken = [[batch.tolist() for batch in islice(loader, None if is_last else num_batches)] for loader in loaders]
        assert len({tuple(map(len, batches)) for batches in taken}) == 1, "all ranks have as many, of the same sizes"
        given_now = Counter(sample for batches in taken for batch in batches for sample in batch)
        state = loaders[0].state_dict()
        assert all(loader.state_dict() == state for loader in loaders)
        seen += given_now
        left, step = size - before, num_ranks * batch_size
        twice += max(0, given_now.total() - left)
        if is_last:
            assert (state["epoch"], state["consumed"]) == (epoch + 1, 0)
            expected = left - left % step if drop_last else left + -left % num_ranks
            assert given_now.total() == expected
            assert twice < num_ranks or not left, "the last ones of an epoch"
            assert seen.total() == size - (left % step if drop_last else 0) + twice
            assert max(seen.values(), default=1) <= 1 + -(-twice // size)
            assert drop_last or set(seen) == set(range(size))
        elif state["epoch"] > epoch:
            return  # islice never asks for the end, so only an epoch without a batch can be here
        else:
            assert given_now.total() >= state["consumed"] - before


@pytest.mark.parametrize(("drop_last", "size"), [(False, 23), (True, 23), (False, 2), (False, 24)])
def test_the_order_is_that_of_torchs_sampler(drop_last: bool, size: int) -> None:
    """So a run moves over in the middle of an epoch: the position is what a rank has had, times the ranks."""
    for rank in range(4 if not drop_last else 3):
        num_ranks = 3 if drop_last else 4
        sampler = DistributedSampler(Numbers(size), num_ranks, rank, seed=9, drop_last=drop_last)
        sampler.set_epoch(2)
        theirs = [batch.tolist() for batch in DataLoader(Numbers(size), 2, sampler=sampler, drop_last=drop_last)]
        loader = map_loaders(size, num_ranks, 2, seed=9, drop_last=drop_last)[rank]
        loader.set_epoch(2)
        assert [batch.tolist() for batch in loader] == theirs
        if len(theirs) > 2:
            loader.load_state_dict({**loader.state_dict(), "epoch": 2, "consumed": 2 * num_ranks})
            assert [batch.tolist() for batch in loader] == theirs[1:]


@given(
    phases=st.lists(
        st.tuples(st.integers(1, 7), st.integers(1, 5), st.lists(st.integers(0, 5), min_size=7, max_size=7))
    ),
    shuffle=st.booleans(),
)
def test_each_sample_of_streams_comes_once(phases: list[tuple[int, int, list[int]]], shuffle: bool) -> None:
    """Though ranks take unlike numbers of batches: a stream has its own position, wherever it is in the list."""
    states: list[Any] = []
    seen: Counter[str] = Counter()
    for num_ranks, batch_size, num_batches in [*phases, (2, 3, [100] * 7)]:
        loaders = stream_loaders(num_ranks, batch_size, shuffle=shuffle, names=[*SIZES][:: (-1) ** num_ranks])
        for loader, limit in zip(loaders, num_batches, strict=False):
            if states:
                loader.load_rank_states(states)
            for batch in islice(loader, limit):
                seen.update(batch)
        states = [loader.state_dict() for loader in loaders]
        if all(state["epoch"] == 1 for state in states):
            break
    assert seen == everything()
    assert {state["epoch"] for state in states} == {1}


def test_epochs_have_other_orders_and_a_pass_goes_on_after_a_break() -> None:
    (loader,) = map_loaders(20, 1, 3)
    first = [sample for batch in islice(loader, 2) for sample in batch.tolist()]
    loader.set_epoch(0)
    rest = [sample for batch in loader for sample in batch.tolist()]
    assert sorted(first + rest) == list(range(20))
    assert loader.epoch == 1
    second = [sample for batch in loader for sample in batch.tolist()]
    assert sorted(second) == list(range(20))
    assert second != first + rest
    loader.set_epoch(0)
    assert [sample for batch in loader for sample in batch.tolist()] == first + rest
    assert len(loader) == 7


def test_who_counts_the_batches_gets_every_epoch() -> None:
    """And never asks for one batch more: an epoch ends when the loop leaves the pass after its last batch."""
    (loader,) = map_loaders(20, 1, 3)
    streams = StreamLoader(["e", "b", "f"], read_stream, 4, rank=0, world_size=1, collate_fn=list)
    for each, num_batches, size in ((loader, len(loader), 20), (streams, 4, 14)):
        for epoch in range(3):
            assert len({str(sample) for batch in islice(each, num_batches) for sample in batch}) == size
            assert each.epoch == epoch + 1
    (other,) = map_loaders(20, 1, 3)
    other.load_state_dict(loader.state_dict())
    assert len(list(other)) == 7, "as in the process that saved"
    assert other.epoch == 4


def at_the_last_batch(loader: MapLoader | StreamLoader) -> dict[str, Any]:
    """What a loop saves in its body then."""
    return [loader.state_dict() for _ in loader][-1]


@pytest.mark.parametrize(
    "make",
    [
        lambda: map_loaders(20, 1, 3)[0],
        lambda: StreamLoader(["e", "b", "f"], read_stream, 4, rank=0, world_size=1, collate_fn=list),
    ],
)
def test_who_saves_at_the_last_batch_neither_repeats_nor_loses_an_epoch(
    make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Whichever epoch the loop of the resumed process begins with."""
    whole = [list(map(str, loader)) for loader in [make()] for _ in range(4)]
    saved = at_the_last_batch(make())
    for first in (0, 1):
        loader = make()
        loader.load_state_dict(saved)
        found = []
        for epoch in range(first, 4):
            loader.set_epoch(epoch)
            found += map(str, loader)
        assert found == [batch for epoch in whole[1:] for batch in epoch]
    assert not caplog.records, "the loop said which epoch it was in"
    loader = make()
    loader.load_state_dict(saved)
    assert list(loader) == []
    assert "is empty: it is the rest of epoch 0" in caplog.text
    assert list(map(str, loader)) == whole[1]
    later = make()
    later.load_state_dict(loader.state_dict())
    later.set_epoch(1)
    assert list(later) == []
    assert "its epoch was over when the position was saved, in epoch 2" in caplog.text
    later.set_epoch(2)
    assert list(map(str, later)) == whole[2]


def test_a_pass_that_was_replaced_says_so() -> None:
    for loader in (map_loaders(20, 1, 2)[0], stream_loaders(1, 2)[0]):
        for replace in (
            lambda it: next(iter(it)),
            lambda it: it.load_state_dict(it.state_dict()),
            lambda it: it.set_epoch(4),
        ):
            batches = iter(loader)
            next(batches)
            replace(loader)
            with pytest.raises(InvalidState, match="is not the newest"):
                next(batches)


def test_the_random_numbers_of_the_training_are_left_alone() -> None:
    for loader in (map_loaders(8, 1, 2)[0], stream_loaders(1, 2)[0]):
        torch.manual_seed(1)
        before = torch.get_rng_state()
        list(loader)
        assert torch.equal(torch.get_rng_state(), before)


class Endless(IterableDataset[int]):
    """Has no length."""

    def __iter__(self) -> Iterator[int]:
        yield 1


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((Endless(), 2), {}, "no samples by number.*StreamLoader"),
        ((Numbers(0), 2), {}, "0 samples make no batch"),
        ((Numbers(3), 0), {}, "batch_size is 0"),
        ((Numbers(3), True), {}, "batch_size is True"),
        ((Numbers(3), 1), {"rank": 1}, "together"),
        ((Numbers(3), 1), {"rank": 2, "world_size": 2}, "rank is 2"),
        ((Numbers(3), 1), {"sampler": range(3)}, "sampler is no option"),
        ((Numbers(3), 1), {"in_order": False, "num_workers": 2}, "in_order is no option"),
        ((Numbers(3), 1), {"seed": -1}, "seed is -1"),
    ],
)
def test_arguments_of_a_map_loader_that_cannot_be(arguments: tuple[Any, int], options: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        MapLoader(*arguments, **options)


@pytest.mark.parametrize(
    ("streams", "options", "message"),
    [
        (["a", "b"], {"rank": 0, "world_size": 3}, "2 streams cannot be divided among 3 ranks"),
        ([], {}, "0 streams"),
        (["a", "a"], {}, "'a' comes twice"),
        ("abc", {}, "list of names"),
        (["a"], {"persistent_workers": True, "num_workers": 1}, "persistent_workers is no option"),
    ],
)
def test_arguments_of_a_stream_loader_that_cannot_be(streams: Sequence[str], options: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        StreamLoader(streams, read_stream, 2, **options)


def test_a_launched_rank_without_a_group_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InvalidState, match="each rank would read everything"):
        MapLoader(Numbers(3), 1)
    assert MapLoader(Numbers(3), 1, rank=0, world_size=1).world_size == 1


def test_a_position_in_other_data_is_refused_with_its_key(tmp_path: Path) -> None:
    with ckptstore.open_store(tmp_path) as store:
        store.save(1, {"data": {"train": map_loaders(20, 1, 2, seed=1)[0]}, "files": stream_loaders(1, 2)[0]})
        other = {"data": {"train": map_loaders(21, 1, 2, seed=2)[0]}}
        with pytest.raises(
            StateMismatch, match=r"'data.train' refused.*dataset_size 20, and is 21 now, seed 1, and is 2"
        ):
            store.resume(other)
        with pytest.raises(StateMismatch, match="MapLoader at 'files' refused its state: it is not the state of a Map"):
            store.load({"files": map_loaders(20, 1, 2)[0]})
        one = StreamLoader([*SIZES, "new"], read_stream, 2)
        with pytest.raises(StateMismatch, match="at 'files' refused its state: it was saved with streams"):
            store.load({"files": one})
    (loader,) = map_loaders(20, 1, 2)
    for bad in ({"consumed": 21}, {"consumed": "1"}, {"epoch": -1}):
        with pytest.raises(StateMismatch, match="are no position in 20 samples"):
            loader.load_state_dict(loader.state_dict() | bad)


def test_states_that_do_not_make_one_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    first, second = map_loaders(20, 2, 2)
    next(iter(second))
    with pytest.raises(
        StateMismatch, match="2 ranks that saved were at different positions: 0 of epoch 0, 4 of epoch 0"
    ):
        first.load_rank_states([first.state_dict(), second.state_dict()])
    first_stream, second_stream = stream_loaders(2, 2)
    with pytest.raises(StateMismatch, match="no rank that saved had the stream"):
        first_stream.load_rank_states([first_stream.state_dict()])
    with pytest.raises(StateMismatch, match="saved by rank 0 of 2, and is rank 1 of 2"):
        second_stream.load_state_dict(first_stream.state_dict())
    second_stream.set_epoch(1)
    next(iter(second_stream))
    with pytest.raises(StateMismatch, match="in the epochs 0, 1"):
        first_stream.load_rank_states([first_stream.state_dict(), second_stream.state_dict()])
    second_stream.set_epoch(0)
    states = [at_the_last_batch(loader) for loader in (first_stream, second_stream)]
    for loader in stream_loaders(7, 2):
        loader.load_rank_states(states)
    assert "has no stream left in epoch" in caplog.text


def trained(root: str, size: int, batch_size: int, num_batches: int, options: dict[str, Any]) -> Any:
    """What this rank is given by both loaders from where the store is, and then saves; None is to the end."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    numbers = MapLoader(Numbers(size), batch_size, seed=3, **options)
    streams = StreamLoader([*SIZES], read_stream, batch_size, collate_fn=list, **options)
    state = ckptstore.all_state(numbers, streams=streams, batches=0)
    with ckptstore.open_store(root) as store:
        found = store.resume(state, per_rank={"rng": "skip"})
        limit = None if num_batches < 0 else num_batches
        given_numbers = [sample for batch in islice(numbers, limit) for sample in batch.tolist()]
        given_streams = [sample for batch in islice(streams, limit) for sample in batch]
        state["batches"] += num_batches
        store.save(0 if found is None else found.step + 1, state)
    torch.distributed.destroy_process_group()
    return given_numbers, given_streams, (numbers.epoch, streams.epoch)


Phases = list[tuple[int, int, int]]
"""Numbers of ranks, the batch sizes, and how many batches each rank takes; the last one, -1, ends the epoch."""


@pytest.mark.parametrize(
    ("num_workers", "parts"),
    [
        (2, [(2, 2, 3), (1, 3, -1)]),
        pytest.param(2, [(3, 2, 3), (2, 3, 2), (4, 2, -1), (3, 4, -1)], marks=pytest.mark.long),
        pytest.param(0, [(1, 4, 3), (3, 2, 2), (2, 5, -1), (3, 4, -1)], marks=pytest.mark.slow),
    ],
)
def test_ranks_resume_what_more_and_fewer_saved(tmp_path: Path, num_workers: int, parts: Phases) -> None:
    """In the middle of an epoch, up to its end; then, in the long ones, the whole of the next one."""
    options = {"num_workers": num_workers, **({"prefetch_factor": 3} if num_workers else {})}
    numbers: Counter[int] = Counter()
    streams: Counter[str] = Counter()
    epoch, left = 0, 61
    for num_ranks, batch_size, num_batches in parts:
        found = run_ranks(num_ranks, trained, str(tmp_path), 61, batch_size, num_batches, options)
        for given_numbers, given_streams, _ in found:
            numbers.update(given_numbers)
            streams.update(given_streams)
        left -= num_ranks * batch_size * num_batches
        if num_batches < 0:
            left += num_ranks * batch_size * num_batches
            epoch += 1
            assert streams == everything()
            assert set(numbers) == set(range(61))
            assert numbers.total() == 61 + -left % num_ranks
            assert {epochs for _, _, epochs in found} == {(epoch, epoch)}
            left = 61
            numbers.clear()
            streams.clear()
    first_ranks, first_size, first_batches = parts[0]
    with ckptstore.open_store(tmp_path) as store:
        assert len(store[0].per_rank("loader")) == 1, "one state for all ranks"
        consumed = store[0].per_rank("loader")[0]["consumed"]
        assert consumed == first_ranks * first_size * first_batches, "not what workers had fetched"
        assert [state["rank"] for state in store[0].per_rank("streams")] == [*range(first_ranks)]


def test_what_cannot_be_divided_is_refused_with_the_ways_out(tmp_path: Path) -> None:
    """What torchdata's loaders and samplers say to another number of ranks, alike on all ranks or not."""
    from torchdata.stateful_dataloader import StatefulDataLoader
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    def parts(rank: int, num_ranks: int) -> Any:
        sampler = StatefulDistributedSampler(Numbers(24), num_ranks, rank, seed=1)
        loader = StatefulDataLoader(Numbers(24), 2, sampler=sampler)
        alike = StatefulDataLoader(Numbers(24), 2, generator=torch.Generator().manual_seed(0))
        return sampler, loader, alike

    def state_of(sampler: Any, loader: Any, alike: Any) -> dict[str, Any]:
        return {"train": per_rank(loader), "in": {"sampler": sampler}, "alike": alike, "rng": per_rank(1)}

    def save(store: ckptstore.CheckpointStore, rank: int) -> None:
        sampler, loader, alike = parts(rank, 2)
        next(iter(loader))
        next(iter(alike))
        store.save(1, state_of(sampler, loader, alike))

    assert run_threads(2, tmp_path, save) == [None] * 2
    sampler, loader, alike = parts(0, 1)
    state = state_of(sampler, loader, alike)
    with ckptstore.open_store(tmp_path) as store:
        with pytest.raises(StateMismatch, match=r"of the 2 ranks that saved had its own alike.*, in\.sampler") as error:
            store.resume(state)
        assert "Where alike, in.sampler, train was means other samples" in str(error.value)
        ways = (
            "Resume on 2 ranks until the epoch ends",
            'per_rank={"alike": "skip"}',
            "ckptstore.integrations.loaders",
        )
        assert [way for way in ways if way not in str(error.value)] == []
        with pytest.raises(StateMismatch, match=r"its own rng, and") as error:
            store.load(state, per_rank={"train": "skip", "in": "first", "alike": "skip"})
        assert "samples" not in str(error.value)
        store.resume(state, per_rank={"train": "skip", "in": "first", "alike": "skip", "rng": "skip"})
        assert sampler.next_yielded == 2, "the first rank's"
        assert len(list(alike)) == 12, "a new epoch"
        numbers = map_loaders(24, 1, 2)[0]
        with pytest.raises(StateMismatch, match="MapLoader at 'alike' refused its state: it is not the state"):
            store.load({"alike": numbers})
