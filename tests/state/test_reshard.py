"""Every layout that four ranks and two save, loaded by four, two and one into every other; in threads."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from meshes import distributed, mesh_for, new_uri
from saving import stored
from thread_ranks import run_threads
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from ckptstore import CheckpointStore, InvalidState, StateMismatch, open_store
from ckptstore.state import replicated

SHAPES = {
    "even": (512, 800),
    "uneven": (1001, 403),
    "thin": (3, 7),
    "vector": (10_007,),
    "scalar": (),
    "cube": (6, 700, 130),
    "empty": (0, 5),
}
LAYOUTS: dict[str, tuple[bool, Any]] = {
    "rows": (False, lambda dims: [Shard(0)]),
    "columns": (False, lambda dims: [Shard(dims - 1)]),
    "replicated": (False, lambda dims: [Replicate()]),
    "hybrid": (True, lambda dims: [Replicate(), Shard(0)]),
    "grid": (True, lambda dims: [Shard(0), Shard(dims - 1)]),
    "strided": (True, lambda dims: [_StridedShard(0, split_factor=2), Shard(0)]),
}
"""Whether the mesh has two dimensions, and the placements."""
NAMES = [f"{layout}.{name}" for name, shape in SHAPES.items() for layout in LAYOUTS if shape or layout == "replicated"]


@cache
def whole(name: str) -> torch.Tensor:
    """The numbers of a tensor. Not to be written to."""
    return torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(list(SHAPES).index(name)))


def placed(name: str, rank: int, ranks: int, *, zeros: bool = False) -> DTensor:
    layout, _, tensor = name.partition(".")
    is_grid, placements = LAYOUTS[layout]
    grid = torch.arange(ranks).reshape((-1, 1 if ranks < 4 else 2) if is_grid else (-1,))
    return distributed(whole(tensor), mesh_for(rank, grid.tolist()), placements(len(SHAPES[tensor])), zeros=zeros)


def save(store: CheckpointStore, rank: int) -> None:
    ranks = store._job.group.world_size
    state: dict[str, Any] = {name: placed(name, rank, ranks) for name in NAMES}
    own = {"statistics": torch.full((4,), float(rank)), "noise": {"seed": torch.tensor([rank, rank]), "at": rank}}
    shared = {"ddp": replicated(whole("uneven").repeat(4, 1)), "same": torch.ones(5), "epoch": 3}
    for step in (1, 2):  # the second one takes the short way
        store.save(step, {**state, **own, **shared, **({"last": "only here"} if rank == ranks - 1 else {})})


@pytest.fixture(scope="module", params=[4, 2])
def uri(request: pytest.FixtureRequest) -> str:
    """A store in which so many ranks have saved."""
    place = new_uri()
    assert run_threads(request.param, place, save) == [None] * request.param
    return place


@pytest.mark.parametrize("ranks", [4, 2, 1])
def test_everything_comes_back_in_every_layout(uri: str, ranks: int) -> None:
    def load(store: CheckpointStore, rank: int) -> list[str]:
        wrong = []
        for layout in LAYOUTS:
            names = {name: f"{layout}.{name.partition('.')[2]}" for name in NAMES}
            names = {name: target for name, target in names.items() if target in NAMES}
            found = {name: placed(target, rank, ranks, zeros=True) for name, target in names.items()}
            store.load(found)
            wrong += [
                f"{name} in {target}"
                for name, target in names.items()
                if not torch.equal(found[name].to_local(), placed(target, rank, ranks).to_local())
            ]
        plain = {"ddp": torch.zeros(4004, 403), "same": torch.zeros(5), "epoch": 0, "last": ""}
        store.load(plain)
        shared = torch.equal(plain["ddp"], whole("uneven").repeat(4, 1)) and torch.equal(plain["same"], torch.ones(5))
        return wrong if shared and (plain["epoch"], plain["last"]) == (3, "only here") else [*wrong, "shared"]

    assert run_threads(ranks, uri, load) == [[]] * ranks


def test_each_byte_is_stored_once_in_equal_shares(uri: str) -> None:
    with open_store(uri) as store:
        index = stored(store[2]).index
        sizes = [file.size_bytes for file in store[2].files if file.name.endswith(".distcp")]
    index.check_complete()
    entries = [entry for entry in index.tensors.values() if not entry.per_rank]
    boxes = [chunk.box.volume for entry in entries for chunk in index.chunks(entry.key, 0)]
    assert sum(boxes) == sum(torch.Size(entry.shape).numel() for entry in entries)
    assert len(sizes) == index.world_size
    assert max(sizes) < 1.25 * min(sizes)


def test_what_differed_needs_a_word_at_another_number_of_ranks(uri: str) -> None:
    with open_store(uri) as store:
        checkpoint, count = store[2], store[2].world_size
    state = {"statistics": torch.full((4,), 9.0), "noise": {"seed": torch.zeros(2, dtype=torch.int64), "at": 9}}
    words = rf"each of the {count} ranks that saved had its own noise, noise\.seed, statistics, and there are 1 ranks"
    with pytest.raises(StateMismatch, match=words):
        checkpoint.load(state)
    checkpoint.load(state, per_rank="skip")
    assert (state["statistics"].tolist(), state["noise"]["at"]) == ([9.0] * 4, 9)
    checkpoint.load(state, per_rank="first")
    assert (state["statistics"].tolist(), state["noise"]["at"], state["noise"]["seed"].tolist()) == (
        [0.0] * 4,
        0,
        [0, 0],
    )
    assert [one.tolist() for one in checkpoint.per_rank("statistics")] == [[float(rank)] * 4 for rank in range(count)]
    assert [one["seed"].tolist() for one in checkpoint.per_rank("noise")] == [[rank, rank] for rank in range(count)]
    assert [one.tolist() for one in checkpoint.per_rank("same")] == [[1.0] * 5]
    assert checkpoint.per_rank("epoch") == [3]


def test_a_dimension_counted_from_the_end_is_that_dimension() -> None:
    full, uri = torch.arange(8.0).reshape(2, 4), new_uri()

    def flow(store: CheckpointStore, rank: int) -> bool:
        last, found = (distributed(full, mesh_for(rank, [0, 1]), [Shard(1)], zeros=zeros) for zeros in (False, True))
        for tensor in (last, found):
            tensor._spec.placements = (Shard(-1),)
        store.save(1, {"last": last})
        store.load({"last": found})
        return torch.equal(found.to_local(), last.to_local())

    assert run_threads(2, uri, flow) == [True, True]
    with open_store(uri) as store:
        assert torch.equal(store[1].to_dict()["last"], full)


DISAGREEING: dict[str, tuple[Any, str]] = {
    "shape": (
        lambda rank, rows: DTensor.from_local(torch.ones(2, 3 + (rank == 3)), *rows),
        "w is a distributed tensor",
    ),
    "kind": (lambda rank, rows: torch.ones(2) if rank == 2 else placed("rows.even", rank, 4), "on rank 2"),
    "value": (lambda rank, rows: 3 if rank == 2 else placed("rows.even", rank, 4), "plain value on rank 2"),
    "dtype": (
        lambda rank, rows: DTensor.from_local(torch.ones(2).bfloat16() if rank == 1 else torch.ones(2), *rows),
        "float32 .* on rank 0 and .* bfloat16 .* rank 1",
    ),
    "partial": (lambda rank, rows: DTensor.from_local(torch.ones(2), rows[0], [Partial()]), "Partial"),
}


@pytest.mark.parametrize("name", DISAGREEING)
def test_ranks_that_disagree_are_told_before_anything_is_committed(name: str) -> None:
    make, words = DISAGREEING[name]

    def flow(store: CheckpointStore, rank: int) -> int:
        with pytest.raises(InvalidState, match=words):
            store.save(1, {"w": make(rank, (mesh_for(rank, [0, 1, 2, 3]), [Shard(0)]))})
        return len(list(store))

    assert run_threads(4, new_uri(), flow) == [0] * 4
