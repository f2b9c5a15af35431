"""Any state of any ranks: a save that returned holds every key of every rank, bit by bit; or it named the key."""

from __future__ import annotations

import dataclasses
import re
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from saving import bits
from threads import distributed, mesh_for, new_uri, run_threads
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import ckptstore
from ckptstore.state import replicated
from ckptstore.state.placement import pieces_of

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
        seed = sum(map(ord, self.key)) + (1000 * (rank + 1) if self.differs else 0)
        numbers = torch.randint(0, 256, (prod(self.shape) * self.dtype.itemsize,), generator=_generator(seed))
        numbers = numbers % 2 if self.dtype is torch.bool else numbers
        return numbers.to(torch.uint8).view(self.dtype).reshape(self.shape)

    def item(self, rank: int, *, zeros: bool = False) -> Any:
        """What the rank has under the key, or what it loads into."""
        if self.kind == "value":
            held = [rank if self.differs else 0, self.key, {"nested": (1.5, None)}]
            return None if zeros else held
        full = self.full(rank)
        full = torch.zeros_like(full) if zeros else full
        if self.kind == "distributed":
            ranks = next((mesh for mesh in self.meshes if rank in torch.tensor(mesh)), self.meshes[0])
            return distributed(full, mesh_for(rank, ranks), self.placements)
        return replicated(full) if self.kind == "replicated" else full

    def is_whole(self) -> bool:
        """Whether the mesh whose copy is stored has every element on ranks that have the key."""
        if self.kind != "distributed" or not self.holders:
            return True
        held = {min(sum_of(mesh)): mesh for mesh in self.meshes if set(self.holders) & set(sum_of(mesh))}
        seen = torch.zeros(self.shape, dtype=torch.bool)
        first = set(sum_of(held[min(held)])) if held else set()
        for rank in first & set(self.holders):
            for box, _ in pieces_of(self.item(rank), self.key):
                seen[tuple(slice(at, at + size) for at, size in zip(box.offsets, box.sizes, strict=True))] = True
        return bool(seen.all())


def sum_of(mesh: Any) -> list[int]:
    """The ranks of a mesh."""
    return torch.tensor(mesh).flatten().tolist()


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@st.composite
def places(draw: Any, world_size: int) -> Place:
    path = tuple(draw(st.lists(st.sampled_from("abc"), min_size=1, max_size=2)))
    kind = draw(st.sampled_from(["distributed", "distributed", "distributed", "value", "tensor", "replicated"]))
    holders = draw(st.sets(st.integers(0, world_size - 1), min_size=1)) if draw(st.booleans()) else range(world_size)
    shape = tuple(draw(st.lists(st.sampled_from([0, 1, 2, 3, 5, 8]), max_size=3)))
    if shape and draw(st.integers(0, 5)) == 0:
        shape = (601, *shape[1:], 701)  # several shares
    place = Place((f"{kind}-{path[0]}", *path[1:]), kind, tuple(sorted(holders)), shape, draw(st.sampled_from(DTYPES)))
    if kind != "distributed":
        return dataclasses.replace(place, differs=kind != "replicated" and draw(st.booleans()))
    meshes, placements = draw(layouts(world_size, len(shape)))
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
    size = draw(st.integers(1, 4))
    # a dict of plain values is one value, so places stand in dicts of their own
    return size, draw(st.lists(places(size), min_size=1, max_size=6, unique_by=lambda place: place.path[0]))


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
            assert any(re.search(rf"{re.escape(place.key)} \(rank", str(error)) for place in broken), error
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


@settings(max_examples=25, deadline=None)
@given(worlds(), st.data())
def test_a_save_holds_every_key_of_every_rank_or_names_it(world: tuple[int, list[Place]], data: Any) -> None:
    check(*world, data)


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(worlds(), st.sampled_from([{}, {"incremental": True}, {"incremental": "reference"}]), st.data())
def test_however_it_is_saved(world: tuple[int, list[Place]], options: dict[str, Any], data: Any) -> None:
    check(*world, data, **options)
