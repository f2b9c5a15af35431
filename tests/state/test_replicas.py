"""What ranks are to have alike is compared: at the first save, at every n-th, and whenever the structure is new."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from meshes import distributed, mesh_for, new_uri, outlined
from thread_ranks import run_threads
from torch.distributed.tensor import Replicate, Shard

import ckptstore
from ckptstore.state import per_rank, replicated


@pytest.fixture(autouse=True, params=["listed", "outlined"])
def kind(request: pytest.FixtureRequest) -> Iterator[str]:
    with outlined(request.param == "outlined"):
        yield request.param


LARGE = torch.arange(3 << 18, dtype=torch.float32).reshape(-1, 64)
"""3 MiB, so that it is dealt to several ranks."""


def with_last_bit(tensor: torch.Tensor) -> torch.Tensor:
    """The same, but for one bit of the last byte."""
    other = tensor.clone()
    other.view(torch.uint8).view(-1)[-1] ^= 1
    return other


def refused(store: ckptstore.CheckpointStore, step: int, state: Any, match: str = ".") -> ckptstore.InvalidState:
    """The error of a save that leaves nothing."""
    before = [checkpoint.step for checkpoint in store]
    with pytest.raises(ckptstore.InvalidState, match=match) as caught:
        store.save(step, state)
    assert [checkpoint.step for checkpoint in store] == before
    return caught.value


def mark(tensor: torch.Tensor, rank: int) -> Any:
    return replicated(tensor)


def spread(tensor: torch.Tensor, rank: int) -> Any:
    return distributed(tensor, mesh_for(rank, [0, 1, 2]), [Replicate()])


@pytest.mark.parametrize("made", [mark, spread])
@pytest.mark.parametrize("wrong", [0, 2])
@pytest.mark.parametrize("tensor", [LARGE, torch.zeros(3), torch.tensor(1.0)], ids=["large", "small", "scalar"])
def test_one_bit_on_one_rank_is_refused_with_key_and_ranks(made: Any, wrong: int, tensor: torch.Tensor) -> None:
    words = "rank 0 vs ranks 1-2" if wrong == 0 else "ranks 0-1 vs rank 2"

    def flow(store: ckptstore.CheckpointStore, rank: int) -> Any:
        own = with_last_bit(tensor.clone().reshape(-1)).reshape(tensor.shape) if rank == wrong else tensor
        error = refused(
            store, 1, {"w": made(own, rank), "v": made(LARGE, rank)}, rf"^A tensor differs .*: w \({words}\)"
        )
        assert error.ranks == (0, 1, 2)
        return store.save(2, {"w": made(tensor, rank), "v": made(LARGE, rank)}).step

    assert run_threads(3, new_uri(), flow) == [2] * 3


def test_equal_nan_is_equal_and_signs_of_zero_are_not() -> None:
    def flow(store: ckptstore.CheckpointStore, rank: int) -> Any:
        store.save(1, {"w": replicated(torch.tensor([float("nan"), -0.0]))})
        refused(store, 2, {"v": replicated(torch.tensor([0.0 if rank else -0.0]))}, "rank 0 vs rank 1")

    assert run_threads(2, new_uri(), flow) == [None] * 2


def test_of_many_keys_the_first_are_named_and_all_are_counted() -> None:
    def flow(store: ckptstore.CheckpointStore, rank: int) -> Any:
        state = {f"w{number}": replicated(torch.tensor(float(rank))) for number in range(9)}
        error = refused(store, 1, {**state, "same": replicated(torch.ones(1))})
        assert re.findall(r"w\d", error.message) == ["w0", "w1", "w2", "w3", "w4"]
        assert "9 tensors differ" in error.message
        assert "and 4 more" in error.message

    assert run_threads(2, new_uri(), flow) == [None] * 2


@pytest.mark.parametrize("compare_every", [None, 1, 3])
def test_later_saves_are_compared_every_so_often(compare_every: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank of the leader counts. A save that is refused is compared again."""
    if compare_every is not None:
        monkeypatch.setenv("CKPTSTORE_COMPARE_EVERY", str(compare_every))
    every = compare_every or 16

    def flow(store: ckptstore.CheckpointStore, rank: int) -> Any:
        weight = LARGE.clone()
        store.save(0, {"w": replicated(weight)})
        if rank == 1:
            weight[-1, -1] += 1
        for step in range(1, every):
            store.save(step, {"w": replicated(weight)})
        for step in range(every, every + 2):
            refused(store, step, {"w": replicated(weight)}, "rank 0 vs rank 1")
        pending = store.save_async(every, {"w": replicated(LARGE)})
        assert pending.result().step == every
        if rank == 1:
            refused(store, every + 1, {"w": replicated(weight), "new": 1}, "rank 0 vs rank 1")
        else:
            refused(store, every + 1, {"w": replicated(LARGE), "new": 1}, "rank 0 vs rank 1")

    assert run_threads(2, new_uri(), flow) == [None] * 2


def test_save_async_is_refused_in_the_call_itself() -> None:
    def flow(store: ckptstore.CheckpointStore, rank: int) -> Any:
        with pytest.raises(ckptstore.InvalidState, match="rank 0 vs rank 1"):
            store.save_async(1, {"w": replicated(torch.full((2,), float(rank)))})
        return len(list(store))

    assert run_threads(2, new_uri(), flow) == [0, 0]


def test_warming_up_compares_nothing_and_the_first_save_does() -> None:
    def flow(store: ckptstore.CheckpointStore, rank: int) -> Any:
        state = {"w": replicated(torch.full((2,), float(rank)))}
        store.warm_up(state)
        refused(store, 1, state, "rank 0 vs rank 1")

    assert run_threads(2, new_uri(), flow) == [None] * 2


def test_ranks_of_several_structures_are_compared_where_they_share() -> None:
    def state_of(rank: int, wrong: int) -> Any:
        state: dict[str, Any] = {f"only{rank}": torch.ones(2), "all": replicated(LARGE + 1)}
        if rank != 1:
            state["some"] = replicated(with_last_bit(LARGE) if rank == wrong else LARGE)
        return state

    def flow(store: ckptstore.CheckpointStore, rank: int) -> Any:
        refused(store, 1, state_of(rank, 2), r"^A tensor differs .*: some \(rank 0 vs rank 2\)")
        store.save(1, state_of(rank, -1))
        store.save(2, state_of(rank, 2))  # not compared
        return len(list(store))

    assert run_threads(3, new_uri(), flow) == [2] * 3


def test_what_is_not_shared_after_all_may_differ() -> None:
    """Under its key another rank has something else: each keeps its own."""

    def flow(store: ckptstore.CheckpointStore, rank: int) -> Any:
        tensor = torch.full((2 + rank // 2,), float(rank))
        store.save(1, {"w": replicated(tensor)})
        loaded = {"w": replicated(torch.zeros_like(tensor))}
        store.load(loaded)
        return torch.equal(loaded["w"].tensor, tensor)

    assert run_threads(3, new_uri(), flow) == [True] * 3


def test_tied_keys_are_looked_at_once_and_those_tied_on_some_ranks_only_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from ckptstore.state.write import replicas

    looked: list[int] = []
    real = replicas.fingerprints_of
    monkeypatch.setattr(replicas, "fingerprints_of", lambda held: looked.append(len(held)) or real(held))

    def flow(store: ckptstore.CheckpointStore, rank: int) -> Any:
        weight, other = LARGE.clone(), LARGE.clone()
        store.save(1, {"a": replicated(weight), "b": replicated(weight)})
        store.save(2, {"a": replicated(weight), "b": replicated(weight if rank else other), "n": 1})
        wrong = with_last_bit(LARGE)
        state = {"a": replicated(weight), "b": replicated(weight if rank else wrong), "m": 1}
        refused(store, 3, state, r": b \(rank 0 vs rank 1\)")

    assert run_threads(2, new_uri(), flow) == [None] * 2
    assert sorted(looked) == [1, 1, 1, 1, 2, 2]


MESHES = {
    "rows": ([[0, 1], [2, 3]], [Replicate(), Shard(0)]),
    "columns": ([[0, 1], [2, 3]], [Shard(1), Replicate()]),
    "all": ([[0, 1], [2, 3]], [Replicate(), Replicate()]),
    "crossed": ([[0, 2], [1, 3]], [Replicate(), Shard(0)]),
}


@pytest.mark.parametrize("name", MESHES)
@pytest.mark.parametrize("wrong", range(4))
def test_the_boxes_of_a_mesh_are_compared_between_those_that_share_them(name: str, wrong: int) -> None:
    """As hybrid sharding has them."""
    ranks, placements = MESHES[name]

    def flow(store: ckptstore.CheckpointStore, rank: int) -> Any:
        tensor = distributed(LARGE, mesh_for(rank, ranks), placements)
        store.save(1, {"w": tensor, "v": distributed(LARGE, mesh_for(rank, [0, 1, 2, 3]), [Shard(0)])})
        if rank == wrong:
            tensor.to_local()[-1, -1] += 1
        error = refused(store, 2, {"w": tensor, "new": 1}, r": w \(")
        assert wrong in error.ranks
        return error.ranks

    found = run_threads(4, new_uri(), flow)
    assert len(set(found)) == 1
    assert len(found[0]) == (4 if name == "all" else 2)


def test_a_mesh_of_which_only_some_ranks_have_the_tensor() -> None:
    def flow(store: ckptstore.CheckpointStore, rank: int) -> Any:
        state: dict[str, Any] = {"always": torch.ones(2)}
        if rank:
            full = with_last_bit(LARGE) if rank == 2 else LARGE
            state["expert"] = distributed(full, mesh_for(rank, [0, 1, 2]), [Replicate()])
        refused(store, 1, state, r": expert \(rank 1 vs rank 2\)")

    assert run_threads(3, new_uri(), flow) == [None] * 3


def test_a_rank_alone_compares_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from ckptstore.state.write import replicas

    monkeypatch.setattr(replicas, "fingerprints_of", None)
    uri = new_uri()
    assert run_threads(1, uri, lambda store, rank: store.save(1, {"w": replicated(LARGE)}).step) == [1]


def model_of(rank: int) -> torch.nn.Module:
    torch.manual_seed(rank)
    return torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Linear(64, 32))


WARNS = "2 of 2 large tensors differ between ranks (model.0.weight, model.1.weight, ...)"


@pytest.mark.parametrize("how", ["forgotten", "marked", "broadcast", "frozen base", "sharded"])
def test_ranks_that_each_train_a_model_of_their_own_are_warned_once(how: str, caplog: pytest.LogCaptureFixture) -> None:
    lock_free = [model_of(0 if how == "broadcast" else rank) for rank in range(2)]
    if how == "frozen base":
        lock_free[1][0].load_state_dict(lock_free[0][0].state_dict())

    def flow(store: ckptstore.CheckpointStore, rank: int) -> Any:
        model: Any = lock_free[rank]
        state: dict[str, Any] = {"model": per_rank(model) if how == "marked" else model}
        if how == "sharded":
            state["table"] = distributed(LARGE, mesh_for(rank, [0, 1]), [Shard(0)])
        store.save(1, state)
        store.save(2, {**state, "new": 1})
        return model[0].weight.equal(store.latest().per_rank("model.0.weight")[rank]) if how == "forgotten" else True

    with caplog.at_level(logging.WARNING, "ckptstore"):
        assert run_threads(2, new_uri(), flow) == [True, True]
    found = [record.getMessage() for record in caplog.records if "large tensors differ" in record.getMessage()]
    assert len(found) == (1 if how == "forgotten" else 0)
    assert all(message.startswith(WARNS) for message in found)


def stepped(rank: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = model_of(rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 + rank)
    model(torch.randn(3, 32)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("same", [False, True], ids=["apart", "alike by chance"])
def test_modules_and_optimizers_of_each_rank_come_back_to_it(same: bool) -> None:
    uri = new_uri()
    runs = [stepped(0 if same else rank) for rank in range(2)]
    fresh = [stepped(7), stepped(8), stepped(9)]

    def numbers(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
        moments = [moment for entry in optimizer.state.values() for moment in entry.values()]
        return [tensor.detach().clone() for tensor in [*model.parameters(), *moments]] + [
            optimizer.param_groups[0]["lr"]
        ]

    def alike(one: list[Any], other: list[Any]) -> bool:
        return len(one) == len(other) and all(
            torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(one, other, strict=True)
        )

    def marked(run: tuple[Any, Any]) -> dict[str, Any]:
        schedule = torch.optim.lr_scheduler.ConstantLR(run[1], factor=1.0)
        return {"m": per_rank(run[0]), "o": per_rank(run[1]), "s": per_rank(schedule)}

    def save(store: ckptstore.CheckpointStore, rank: int) -> Any:
        store.save(1, marked(runs[rank]))
        store.load(marked(fresh[rank]))
        return alike(numbers(*fresh[rank]), numbers(*runs[rank]))

    assert run_threads(2, uri, save) == [True, True]

    def load(how: Any) -> Any:
        def flow(store: ckptstore.CheckpointStore, rank: int) -> Any:
            target = stepped(20 + rank)
            before = numbers(*target)
            store.load(marked(target), per_rank=how)
            return alike(numbers(*target), before), alike(numbers(*target), numbers(*runs[0]))

        return flow

    for world_size in (1, 3):
        assert run_threads(world_size, uri, load("first")) == [(False, True)] * world_size
        assert run_threads(world_size, uri, load("skip")) == [(True, False)] * world_size
        for error in run_threads(world_size, uri, load("error")):
            assert isinstance(error, ckptstore.StateMismatch)
            assert "m.0.bias" in str(error)


def test_what_is_distributed_cannot_be_marked_as_the_rank_s_own() -> None:
    def flow(store: ckptstore.CheckpointStore, rank: int) -> Any:
        model = torch.nn.Linear(4, 4)
        sharded = distributed(torch.ones(4, 4), mesh_for(rank, [0, 1]), [Shard(0)])
        model.weight = torch.nn.Parameter(sharded)
        refused(store, 1, {"m": per_rank(model)}, r"^m\.weight is marked as the rank's own, and it is distributed")
        refused(store, 1, {"t": per_rank(sharded)}, r"^t is marked as the rank's own, and it is distributed")

    assert run_threads(2, new_uri(), flow) == [None] * 2


def test_what_is_tied_to_marked_tensors_is_each_rank_s_own_too() -> None:
    """Whichever of the two comes first in the state."""
    uri = new_uri()

    def state_of(number: float) -> dict[str, Any]:
        critic, actor = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
        torch.nn.init.constant_(critic.weight, number)
        actor.weight = critic.weight
        actor.bias = critic.bias
        return {"critic": critic, "actor": per_rank(actor)}

    def flow(store: ckptstore.CheckpointStore, rank: int) -> Any:
        store.save(1, state_of(5.0))
        return sorted(key for key, entry in store.latest().tensors.items() if len(entry.ranks) > 1)

    assert run_threads(2, uri, flow) == [["actor.bias", "actor.weight", "critic.bias", "critic.weight"]] * 2
