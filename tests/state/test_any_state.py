"""Any state of any ranks: a save that returned holds every key of every rank, bit by bit; or it named the key."""

from __future__ import annotations

import dataclasses
import functools
import re
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from meshes import distributed, mesh_for, new_uri, outlined
from saving import bits
from thread_ranks import run_threads
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import ckptstore
from ckptstore.state import replicated
from ckptstore.state.tensors.placement import pieces_of
from ckptstore.state.write import assignment, outlining

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8, torch.complex64, torch.float8_e4m3fn]


@dataclasses.dataclass(frozen=True)
class Place:
    """One key: what it is, and who has it."""

    path: tuple[str, ...]
    kind: str
    holders: tuple[int, ...]
    shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32
    differs: bool = False
    meshes: tuple[Any, ...] = ()
    """Ranks of meshes, as nested lists, each with a copy of the whole."""
    placements: tuple[Any, ...] = ()

    @property
    def key(self) -> str:
        return ".".join(self.path)

    def full(self, rank: int) -> torch.Tensor:
        """The whole tensor, as a rank has it."""
        return numbers(sum(map(ord, self.key)) + (1000 * (rank + 1) if self.differs else 0), self.shape, self.dtype)

    def item(self, rank: int, *, zeros: bool = False) -> Any:
        """What the rank has under the key, or what it loads into."""
        if self.kind == "value":
            held = [rank if self.differs else 0, self.key, {"nested": (1.5, None)}]
            return None if zeros else held
        full = self.full(rank)
        full = torch.zeros_like(full) if zeros else full
        if self.kind == "distributed":
            return distributed(full, mesh_for(rank, self.mesh_of(rank)), self.placements)
        return replicated(full) if self.kind == "replicated" else full

    def mesh_of(self, rank: int) -> Any:
        """The mesh by which a rank has it; one in no mesh has no part of the first one's."""
        return next((mesh for mesh in self.meshes if rank in sum_of(mesh)), self.meshes[0])

    def is_whole(self) -> bool:
        """Whether the mesh whose copy is stored has every element on ranks that have the key."""
        if self.kind != "distributed" or not self.holders:
            return True
        first = min((sum_of(self.mesh_of(rank)) for rank in self.holders), key=min)
        seen = torch.zeros(self.shape, dtype=torch.bool)
        for rank in set(first) & set(self.holders):
            for box, _ in pieces_of(self.item(rank), self.key):
                seen[tuple(slice(at, at + size) for at, size in zip(box.offsets, box.sizes, strict=True))] = True
        return bool(seen.all())


def sum_of(mesh: Any) -> list[int]:
    """The ranks of a mesh."""
    return torch.tensor(mesh).flatten().tolist()


@functools.cache
def numbers(seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Random ones, which come again after a prime number of bytes, at no place where something else begins."""
    size = prod(shape) * dtype.itemsize
    few = torch.randint(0, 2 if dtype is torch.bool else 256, (4099,), generator=torch.Generator().manual_seed(seed))
    return few.to(torch.uint8).repeat(size // 4099 + 1)[:size].view(dtype).reshape(shape)


@st.composite
def places(draw: Any, world_size: int) -> Place:
    path = tuple(draw(st.lists(st.sampled_from("abcdef"), min_size=1, max_size=2)))
    kind = draw(st.sampled_from(["distributed"] * 5 + ["value", "tensor", "replicated"]))
    who = draw(st.sampled_from(["some", "some", "all", "all", "any"]))
    holders = range(world_size) if who == "all" else draw(st.sets(st.integers(0, world_size - 1), min_size=1))
    shape = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 5, 8, 0]), max_size=3)))
    if shape and draw(st.integers(0, 5)) == 0:
        shape = (601, *shape[1:2], 701)  # several shares
    place = Place((f"{kind}-{path[0]}", *path[1:]), kind, tuple(sorted(holders)), shape, draw(st.sampled_from(DTYPES)))
    if kind != "distributed":
        return dataclasses.replace(place, differs=kind != "replicated" and draw(st.booleans()))
    meshes, placements = draw(layouts(world_size, len(shape)))
    if who == "some":  # of what is the same on all ranks of a mesh; else most of these have a hole, and are refused
        placements, ranks = (Replicate(),) * len(placements), sum_of(meshes[0])
        held = draw(st.sets(st.sampled_from(ranks[1:] or ranks), min_size=1)) | draw(st.sets(st.sampled_from(ranks)))
        place = dataclasses.replace(place, holders=tuple(sorted(held)))
    return dataclasses.replace(place, meshes=meshes, placements=placements)


@st.composite
def layouts(draw: Any, world_size: int, dims: int) -> Any:
    """One mesh of some of the ranks in any order, or two of one shape; and how a tensor lies on it."""
    ranks = draw(st.permutations(range(world_size)))
    ranks = ranks[: draw(st.integers(1, world_size))]
    count = 2 if len(ranks) % 2 == 0 and draw(st.integers(0, 3)) == 0 else 1
    size = len(ranks) // count
    grid = draw(st.sampled_from([shape for shape in [(size,), (2, size // 2), (size // 2, 2)] if prod(shape) == size]))
    meshes = tuple(
        torch.tensor(ranks[index * size : (index + 1) * size]).reshape(grid).tolist() for index in range(count)
    )
    kinds: list[Any] = [Replicate(), Replicate(), *(Shard(dim) for dim in range(dims))]
    if len(grid) == 2 and dims and draw(st.integers(0, 3)) == 0:
        return meshes, (_StridedShard(0, split_factor=grid[1]), Shard(0))
    return meshes, tuple(draw(st.sampled_from(kinds)) for _ in grid)


@st.composite
def worlds(draw: Any) -> tuple[int, list[Place]]:
    size = draw(st.sampled_from([4, 3, 2, 1]))
    # a dict of plain values is one value, so places stand in dicts of their own
    least = draw(st.sampled_from([4, 1]))
    return size, draw(st.lists(places(size), min_size=least, max_size=6, unique_by=lambda place: place.path[0]))


def state_of(drawn: list[Place], rank: int, *, zeros: bool = False) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for place in drawn:
        if rank in place.holders:
            inner = state
            for part in place.path[:-1]:
                inner = inner.setdefault(part, {})
            inner[place.path[-1]] = place.item(rank, zeros=zeros)
    return state


def at(state: Any, place: Place) -> Any:
    for part in place.path:
        state = state[part]
    return state


def same(found: Any, expected: Any) -> bool:
    found, expected = (item.tensor if hasattr(item, "tensor") else item for item in (found, expected))
    if not isinstance(expected, torch.Tensor):
        return bool(found == expected)
    left, right = (item.to_local() if hasattr(item, "to_local") else item for item in (found, expected))
    return left.dtype == right.dtype and left.shape == right.shape and bits(left) == bits(right)


def check(size: int, drawn: list[Place], data: Any, **options: Any) -> None:
    with outlined(data.draw(st.booleans())):
        _check(size, drawn, data, **options)


def _check(size: int, drawn: list[Place], data: Any, **options: Any) -> None:
    uri, broken = new_uri(), [place for place in drawn if not place.is_whole()]

    def save(store: ckptstore.CheckpointStore, rank: int) -> list[str]:
        store.save(1, state_of(drawn, rank), **options)
        store.save(2, state_of(drawn, rank), **options)  # by the agreement of the first one
        found = state_of(drawn, rank, zeros=True)
        store.load(found)
        held = [place for place in drawn if rank in place.holders]
        return [place.key for place in held if not same(at(found, place), place.item(rank))]

    told = run_threads(size, uri, save)
    if broken:
        for error in told:
            assert isinstance(error, ckptstore.InvalidState)
            assert any(
                re.search(rf"{re.escape(place.key)} (\(rank|is on several meshes)", str(error)) for place in broken
            ), error
        return
    assert told == [[]] * size
    other = data.draw(st.sampled_from([count for count in range(1, 5) if count != size]))
    moved = []
    for place in drawn:
        meshes, placements = data.draw(layouts(other, len(place.shape)))
        moved.append(dataclasses.replace(place, holders=tuple(range(other)), meshes=meshes, placements=placements))

    def load(store: ckptstore.CheckpointStore, rank: int) -> list[str]:
        found, wrong = state_of(moved, rank, zeros=True), []
        store.load(found, per_rank="first")
        for place, saved in zip(moved, drawn, strict=True):
            expected = place.item(rank if place.kind == "distributed" else saved.holders[0])
            wrong += [] if same(at(found, place), expected) else [place.key]
        return wrong

    assert run_threads(other, uri, load) == [[]] * other


@settings(max_examples=min(40, settings.default.max_examples), deadline=None)
@given(worlds(), st.data())
def test_a_save_holds_every_key_of_every_rank_or_names_it(world: tuple[int, list[Place]], data: Any) -> None:
    check(*world, data)


INCREMENTAL = st.sampled_from([{"incremental": True}, {"incremental": "reference"}])


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(worlds(), INCREMENTAL, st.data())
def test_saves_of_what_changed(world: tuple[int, list[Place]], options: dict[str, Any], data: Any) -> None:
    check(*world, data, **options)


@pytest.mark.long
@pytest.mark.timeout(1200)  # 200 examples, each saved and loaded, take minutes on a busy machine
@given(worlds(), st.one_of(st.just({}), INCREMENTAL), st.data())
def test_however_it_is_saved(world: tuple[int, list[Place]], options: dict[str, Any], data: Any) -> None:
    check(*world, data, **options)


def test_a_deal_by_the_place_in_the_mesh_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is drawn is worth something: it finds tensors that are dealt to ranks which do not have them, and which
    nobody misses before the commit."""

    def by_place(_: Any, item: Any) -> Any:
        return assignment._Group(item.sharers, None, max(1, len(item.sharers)), item.position)

    @settings(max_examples=40, deadline=None, derandomize=True, phases=[Phase.generate], database=None)
    @given(worlds(), st.data())
    def search(world: tuple[int, list[Place]], data: Any) -> None:
        check(*world, data)

    monkeypatch.setattr(assignment._Planner, "_group", by_place)
    monkeypatch.setattr(outlining.RankStructures, "_lost", lambda *_: [])
    monkeypatch.setattr(outlining.Outliner, "check", lambda *_: None)
    with pytest.raises(AssertionError, match=r"StateMismatch|which no rank has"):
        search()
