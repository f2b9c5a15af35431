"""What belongs to a rank although all ranks have the same, and what becomes of it on another number of ranks."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from thread_ranks import run_threads

from ckptstore import CheckpointStore, InvalidInput, InvalidState, StateMismatch, open_store
from ckptstore.interchange import export
from ckptstore.loading import index_read
from ckptstore.state import per_rank


class StatefulLoader:
    """As a data loader whose position is alike on all ranks."""

    def __init__(self, position: int) -> None:
        self.position: Any = position

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "seen": torch.arange(3)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class Divisible(StatefulLoader):
    """Takes the states of all ranks."""

    heard: ClassVar[list[Any]] = []

    def __init__(self) -> None:
        super().__init__(0)

    def load_rank_states(self, states: list[dict[str, Any]]) -> None:
        assert all(state["seen"].tolist() == [0, 1, 2] for state in states)
        self.heard.append([state["position"] for state in states])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("the number of ranks is another one")


class Shuffled:
    """As a sampler whose numbers are alike on all ranks, and whose order is not."""

    def __init__(self, start: int = 0) -> None:
        self.order = torch.arange(start, start + 3)

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": 1, "order": self.order}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order = state["order"]

    def load_rank_states(self, states: list[dict[str, Any]]) -> None:
        self.order = torch.cat([state["order"] for state in states])


@pytest.fixture(params=[index_read.HEAD_BYTES, 64], ids=["small index", "large index"])
def _of_any_size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a large index, a load reads only the parts that it needs."""
    monkeypatch.setattr(index_read, "HEAD_BYTES", request.param)


@pytest.mark.usefixtures("_of_any_size")
def test_an_object_takes_the_states_of_all_ranks(tmp_path: Path) -> None:
    made = lambda rank: {"in": {"it": StatefulLoader(7 + rank)}, "alike": StatefulLoader(5)}  # noqa: E731
    saved(tmp_path, num_ranks=3, state=made)
    Divisible.heard.clear()

    run_threads(2, tmp_path, lambda store, rank: store.resume({"in": {"it": Divisible()}, "alike": Divisible()}).step)
    assert sorted(Divisible.heard) == [[5, 5, 5]] * 2 + [[7, 8, 9]] * 2
    Divisible.heard.clear()
    with open_store(tmp_path) as store:
        assert [state["position"] for state in store[2].per_rank("in.it")] == [7, 8, 9]
        assert [state["position"] for state in store[2].per_rank("alike")] == [5]


@pytest.mark.usefixtures("_of_any_size")
def test_a_state_is_the_ranks_own_if_only_a_tensor_in_it_differs(tmp_path: Path) -> None:
    saved(tmp_path, num_ranks=3, state=lambda rank: {"it": Shuffled(10 * rank)})

    def flow(store: CheckpointStore, rank: int) -> list[int]:
        sampler = Shuffled()
        store.load({"it": sampler})
        return sampler.order.tolist()

    orders = [[0, 1, 2], [10, 11, 12], [20, 21, 22]]
    assert run_threads(3, tmp_path, flow) == orders
    assert run_threads(2, tmp_path, flow) == [[0, 1, 2, 10, 11, 12, 20, 21, 22]] * 2
    with open_store(tmp_path) as store:
        assert [state["order"].tolist() for state in store[2].per_rank("it")] == orders


@pytest.mark.usefixtures("_of_any_size")
def test_an_export_counts_a_value_that_is_a_tensor_on_a_lower_rank(tmp_path: Path) -> None:
    saved(tmp_path / "s", num_ranks=3, state=lambda rank: {"w": torch.ones(3) if rank < 2 else 5})
    with open_store(tmp_path / "s") as store:
        report = export(store[2], tmp_path / "out", to="safetensors")
    assert "1 plain values are left out, safetensors holds tensors only" in report.notices


def saved(root: Path, *, num_ranks: int, state: Any) -> None:
    """Save twice: in the second save the ranks remember what they found in the first."""

    def flow(store: CheckpointStore, rank: int) -> None:
        for step in (1, 2):
            store.save(step, state(rank))

    assert run_threads(num_ranks, root, flow) == [None] * num_ranks


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_what_is_marked_is_kept_for_each_rank_though_alike(tmp_path: Path, num_ranks: int) -> None:
    made = {"loader": per_rank(StatefulLoader(7)), "in": {"n": per_rank(5), "plain": 6}, "epoch": 3}
    saved(tmp_path, num_ranks=num_ranks, state=lambda rank: made)

    def flow(store: CheckpointStore, rank: int) -> Any:
        loader = StatefulLoader(0)
        state: dict[str, Any] = {"loader": per_rank(loader), "in": {"n": per_rank(0), "plain": 0}}
        store.load(state)
        return loader.position, state["in"]["n"].item, state["in"]["plain"]

    assert run_threads(num_ranks, tmp_path, flow) == [(7, 5, 6)] * num_ranks
    with open_store(tmp_path) as store:
        for checkpoint in store:
            assert checkpoint.per_rank("in.n") == [5] * num_ranks
            assert [value["position"] for value in checkpoint.per_rank("loader")] == [7] * num_ranks

    def on_others(store: CheckpointStore, rank: int) -> None:
        loader = StatefulLoader(0)
        state: dict[str, Any] = {"loader": loader, "in": {"n": 0, "plain": 0}}
        with pytest.raises(StateMismatch, match=r"its own in\.n, loader, .*there are 3 ranks now"):
            store.load(state)
        store.load(part := {"epoch": 0})
        assert part == {"epoch": 3}, "what nobody asks for may differ"
        store.load(state, per_rank={"load*": "first", "in": "skip"})
        assert (loader.position, state["in"]) == (7, {"n": 0, "plain": 6})
        with pytest.raises(StateMismatch, match=r"its own in\.n, and") as caught:
            store.load(state, per_rank={"loader": "first", "in.m": "skip"})
        assert '{"in.n": "skip"}' in str(caught.value)

    assert run_threads(3, tmp_path, on_others) == [None] * 3


def test_a_loader_that_was_not_marked_is_refused_too(tmp_path: Path) -> None:
    saved(tmp_path, num_ranks=2, state=lambda rank: {"loader": StatefulLoader(7), "epoch": 1})
    state = {"loader": StatefulLoader(0), "epoch": 0}
    with open_store(tmp_path) as store:
        store.load(state, include="epoch")
        text = r"its own loader, loader\.seen, .*Where loader was means other samples"
        with pytest.raises(StateMismatch, match=text):
            store.load(state)
        store.load(state, per_rank={"loader": "skip"})
        assert (state["loader"].position, state["epoch"]) == (0, 1)
        store.load(state, per_rank="first")
        assert state["loader"].position == 7
        store.load({"loader": Divisible()}, per_rank="first")
        store.load({"loader": Divisible()}, per_rank={"loader": "skip"})
        assert Divisible.heard == [[7, 7]], "but where it is named"
    assert run_threads(2, tmp_path, lambda store, rank: store.load({"loader": StatefulLoader(0)}).step) == [2] * 2


def test_what_cannot_be_marked_and_bad_choices_are_refused(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        for item in ([torch.nn.Linear(1, 1)], {"inner": StatefulLoader(1)}, per_rank(1)):
            with pytest.raises(InvalidState, match=r"^a\.b is marked as the rank's own"):
                store.save(1, {"a": {"b": per_rank(item)}})
        store.save(1, {"epoch": 1})
        with pytest.raises(InvalidInput, match="per_rank is 'last'"):
            store.load({"epoch": 0}, per_rank={"epoch": "last"})


def _mersenne(rank: int) -> Any:
    return torch.Generator().manual_seed(rank).get_state()


RANDOM: dict[str, tuple[str, Callable[[int], Any]]] = {
    "the tensor of torch": ("noise", _mersenne),
    "a tensor in a dict": ("trainer", lambda rank: {"a": [{"state": _mersenne(rank)}]}),
    "a tensor in a tuple": ("trainer", lambda rank: (1, _mersenne(rank))),
    "of an accelerator": ("cuda_states", lambda rank: [torch.full((16,), rank, dtype=torch.uint8)]),
    "python": ("mine", lambda rank: {"shuffle": random.Random(rank).getstate()}),
    "python from JSON": ("mine", lambda rank: [3, [*random.Random(rank).getstate()[1]], None]),
    "numpy": ("mine", lambda rank: np.random.RandomState(rank).get_state(legacy=False)),
    "older numpy": ("mine", lambda rank: np.random.RandomState(rank).get_state()),
    "a generator of numpy": ("mine", lambda rank: {"of": np.random.default_rng(rank).bit_generator.state}),
    "a counter by its name": ("dropout_rng", lambda rank: torch.tensor([rank, 7])),
    "a place by its name": ("random", lambda rank: rank),
}


@pytest.mark.parametrize("name", RANDOM)
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_random_numbers_that_ranks_get_from_one_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, num_ranks: int
) -> None:
    key, state_of = RANDOM[name]
    state = lambda rank: {key: state_of(rank), "place": rank, "bytes": torch.full((16,), rank).byte()}  # noqa: E731
    run_threads(2, tmp_path / "store", lambda store, rank: store.save(1, state(rank)).step)
    run_threads(num_ranks, tmp_path / "store", lambda store, rank: store.load(state(9 + rank), per_rank="first").step)
    warned = [record.getMessage() for record in caplog.records if "random numbers" in record.getMessage()]
    assert len(warned) == (num_ranks == 3)
    if warned:
        assert f"by {key}" in warned[0]
        assert "place" not in warned[0]


def test_random_numbers_that_are_left_out_or_not_loaded_are_not_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = lambda rank: {"rng": _mersenne(rank), "place": rank}  # noqa: E731
    run_threads(2, tmp_path / "store", lambda store, rank: store.save(1, state(rank)).step)
    for options in ({"per_rank": {"rng": "skip", "place": "first"}}, {"per_rank": "first", "include": "place"}):
        run_threads(3, tmp_path / "store", lambda store, rank: store.load(state(9), **options).step)  # noqa: B023
    assert "random numbers" not in caplog.text


def test_what_differs_comes_back_to_each_rank(tmp_path: Path) -> None:
    def flow(store: CheckpointStore, rank: int) -> Any:
        checkpoint = store.save(1, {"position": 10 + rank, "same": 5, "tensor": torch.full((3,), float(rank))})
        assert (checkpoint.per_rank("position"), checkpoint.per_rank("same")) == ([10, 11], [5])
        found: dict[str, Any] = {"position": -1, "same": -1, "tensor": torch.full((3,), -1.0)}
        store.load(found)
        return found["position"], found["same"], found["tensor"].tolist()

    assert run_threads(2, tmp_path, flow) == [(10 + rank, 5, [float(rank)] * 3) for rank in range(2)]
