"""Which boxes each rank has, by arithmetic: as torch cuts, exactly once, and found again from any box."""

from __future__ import annotations

import json
from itertools import product
from math import prod
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from meshes import mesh_for
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from ckptstore.state.tensors.boxes import REPLICATED, Box, Cut, overlap
from ckptstore.state.tensors.layouts import Mesh, MeshLayout
from ckptstore.state.tensors.placement import mesh_share, pieces_of


@st.composite
def layouts(draw: Any) -> tuple[MeshLayout, tuple[int, ...]]:
    """A mesh of some ranks of a job in any order, how it cuts, and the shape of a tensor."""
    grid = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    first = draw(st.integers(0, 5))
    regular = list(range(first, first + prod(grid)))
    ranks = draw(st.one_of(st.just(regular), st.permutations(regular)))
    shape = tuple(draw(st.lists(st.integers(0, 13), max_size=3)))
    dims = st.sampled_from([REPLICATED, *range(len(shape))])
    cuts = tuple(Cut(dim, draw(st.integers(1, 3)) if dim >= 0 else 1) for dim in (draw(dims) for _ in grid))
    return MeshLayout(Mesh(grid, tuple(ranks)), cuts), shape


def cells_of(boxes: Any) -> list[tuple[int, ...]]:
    """The elements of some boxes."""
    return [
        cell
        for box in boxes
        for cell in product(*(range(at, at + size) for at, size in zip(box.offsets, box.sizes, strict=True)))
    ]


@given(layouts())
def test_each_element_is_on_one_rank_of_each_set_of_copies(drawn: tuple[MeshLayout, tuple[int, ...]]) -> None:
    layout, shape = drawn
    of_rank = {rank: layout.boxes_of(rank, shape) for rank in layout.ranks}
    cells = [cell for boxes in of_rank.values() for cell in cells_of(boxes)]
    assert sorted(cells) == sorted(list(np.ndindex(*shape)) * layout.num_copies)
    for rank, boxes in of_rank.items():
        sharers = layout.sharers_of(rank)
        assert rank in sharers
        assert len(sharers) == layout.num_copies
        assert {of_rank[other] for other in sharers} == {boxes}
    assert layout.num_boxes(shape) * layout.num_copies == sum(map(len, of_rank.values()))
    stranger = max(layout.ranks) + 1
    assert layout.boxes_of(stranger, shape) == layout.sharers_of(stranger) == ()


@given(layouts(), st.data())
def test_the_ranks_that_have_a_part_of_a_box_are_found(drawn: tuple[MeshLayout, tuple[int, ...]], data: Any) -> None:
    layout, shape = drawn
    offsets = tuple(data.draw(st.integers(0, size)) for size in shape)
    sizes = tuple(data.draw(st.integers(0, size - at)) for size, at in zip(shape, offsets, strict=True))
    wanted = Box(offsets, sizes)
    expected = [
        rank
        for rank in layout.ranks
        if any(overlap(box, wanted) is not None for box in layout.boxes_of(rank, shape)) and wanted.volume
    ]
    assert sorted(layout.ranks_meeting(shape, wanted).tolist()) == sorted(expected)


@given(layouts())
def test_a_layout_comes_back_from_json(drawn: tuple[MeshLayout, tuple[int, ...]]) -> None:
    layout, _ = drawn
    found = MeshLayout.from_json(json.loads(json.dumps(layout.to_json())))
    assert found == layout
    assert hash(found) == hash(layout)
    numbers = {rank: rank + 7 for rank in layout.ranks}
    moved = layout.renumbered(numbers)
    assert moved is not None
    assert moved != layout
    assert moved.renumbered({new: old for old, new in numbers.items()}) == layout
    assert layout.renumbered({}) is None


def test_regular_meshes_are_not_listed() -> None:
    mesh = Mesh((128, 128), tuple(np.arange(1 << 14).reshape(128, 128).T.reshape(-1).tolist()))
    assert mesh.to_json() == {"shape": [128, 128], "first": 0, "steps": [1, 128]}
    assert Mesh.from_json(mesh.to_json()) == mesh


@pytest.mark.parametrize(
    "value",
    [
        {"shape": [2], "first": 0, "steps": [0]},
        {"shape": [1 << 11, 1 << 11], "first": 0, "steps": [1 << 11, 1]},
    ],
    ids=str,
)
def test_a_mesh_that_cannot_be_is_refused(value: Any) -> None:
    with pytest.raises((ValueError, KeyError, TypeError)):
        MeshLayout.from_json({"mesh": value, "cuts": [[0, 1]]})


def test_a_rank_that_the_save_had_not_is_refused_before_the_mesh_is_built() -> None:
    fits = {"mesh": {"shape": [3], "first": 1, "steps": [2]}, "cuts": [[0, 1]]}
    assert MeshLayout.from_json(fits, num_ranks=6).ranks == (1, 3, 5)
    for value in ({"shape": [3], "first": 2, "steps": [2]}, {"shape": [7], "first": 0, "steps": [0]}):
        with pytest.raises(ValueError, match=r"is not a whole number|is huge"):
            MeshLayout.from_json(fits | {"mesh": value}, num_ranks=6)


def test_what_is_too_fine_for_arithmetic_has_no_layout() -> None:
    """Boxes of it are listed; in JSON it is refused."""
    mesh = mesh_for(0, [0, 1])
    placements = [_StridedShard(0, split_factor=1 << 22)]
    tensor = DTensor.from_local(torch.zeros(1), mesh, placements, run_check=False, shape=(2,), stride=(1,))
    assert mesh_share(tensor).layout is None
    with pytest.raises(ValueError, match="too many runs"):
        MeshLayout.from_json({"mesh": {"shape": [2], "ranks": [0, 1]}, "cuts": [[0, 1 << 22]]})
    both = Mesh((4, 4), tuple(range(16)))
    assert not MeshLayout(both, (Cut(0, 1 << 20), Cut(1, 1 << 20))).is_fine


def test_a_dimension_counted_from_the_end_is_that_dimension() -> None:
    last = DTensor.from_local(torch.zeros(2, 2), mesh_for(1, [0, 1]), [Shard(1)], run_check=False)
    last._spec.placements = (Shard(-1),)
    layout = mesh_share(last).layout
    assert layout is not None
    assert layout.boxes_of(1, (2, 4)) == (Box((0, 2), (2, 2)),)
    assert [piece.box for piece in pieces_of(last, "last")] == [Box((0, 2), (2, 2))]
