"""Layouts that hypothesis draws: against torch's own cutting, and with JSON that was altered."""

from __future__ import annotations

import json
from math import prod
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from meshes import mesh_for
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from ckptstore.state.tensors.boxes import REPLICATED, Box, Cut, overlap, whole
from ckptstore.state.tensors.layouts import Mesh, MeshLayout
from ckptstore.state.tensors.placement import mesh_share


@st.composite
def placed(draw: Any) -> tuple[tuple[int, ...], tuple[int, ...], list[Any]]:
    """The shapes of a mesh and of a tensor, and torch's placements."""
    grid = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    shape = tuple(draw(st.lists(st.integers(0, 13), max_size=3)))
    dims = st.sampled_from(range(len(shape))) if shape else st.nothing()
    split = dims.map(Shard) | st.builds(_StridedShard, dims, split_factor=st.integers(1, 5))
    return grid, shape, [draw(split | st.just(Replicate())) for _ in grid]


@given(placed())
def test_each_rank_has_what_torch_cuts_for_it(drawn: tuple[tuple[int, ...], tuple[int, ...], list[Any]]) -> None:
    grid, shape, placements = drawn
    full = torch.arange(prod(shape)).reshape(shape)
    locals_of = [full]
    for size, placement in zip(grid, placements, strict=True):
        locals_of = [
            part
            for local in locals_of
            for part in (
                [local] * size
                if isinstance(placement, Replicate)
                else placement._split_tensor(local, size, with_padding=False)[0]
            )
        ]
    cuts = tuple(
        Cut(REPLICATED) if isinstance(one, Replicate) else Cut(one.dim, getattr(one, "split_factor", 1))
        for one in placements
    )
    layout = MeshLayout(Mesh(grid, tuple(range(3, 3 + prod(grid)))), cuts)
    met = set(layout.ranks_meeting(shape, whole(shape)).tolist())
    for rank, local in enumerate(locals_of, start=3):
        boxes = layout.boxes_of(rank, shape)
        found = [full[tuple(map(slice, box.offsets, np.add(box.offsets, box.sizes)))].reshape(-1) for box in boxes]
        assert sorted(n for part in found for n in part.tolist()) == sorted(local.reshape(-1).tolist())
        assert (rank in met) == bool(local.numel())


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


LAYOUTS = [
    MeshLayout(Mesh((2, 3), (0, 1, 2, 3, 4, 5)), (Cut(0, 3), Cut(0))),
    MeshLayout(Mesh((2, 2), (3, 1, 2, 0)), (Cut(REPLICATED), Cut(1))),
]
ODD: list[Any] = [None, True, -1, 0, 7, 0.5, 1e300, 1 << 21, 1 << 70, "", "12", [], [0], [[0, 1]], {}, {"shape": [1]}]


def altered(value: Any, draw: Any) -> Any:
    """JSON with one thing in it replaced, removed or added."""
    if isinstance(value, dict | list) and value and draw(st.integers(0, 5)):
        key = draw(st.sampled_from(sorted(value) if isinstance(value, dict) else range(len(value))))
        how = draw(st.sampled_from(["within", "within", "within", "without", "twice"]))
        changed = value.copy()
        if how == "without":
            del changed[key]
        elif how == "twice" and isinstance(changed, list):
            changed.append(changed[key])
        else:
            changed[key] = altered(value[key], draw)
        return changed
    return draw(st.sampled_from(ODD))


@given(st.sampled_from(LAYOUTS), st.data())
def test_altered_json_is_refused_or_a_layout_that_answers(layout: MeshLayout, data: Any) -> None:
    text = json.dumps(altered(layout.to_json(), data.draw))
    try:
        found = MeshLayout.from_json(json.loads(text))
    except (ValueError, KeyError, TypeError):
        return
    shape = (5,) * (1 + max([cut.dim for cut in found.cuts], default=0))
    having = [rank for rank in found.ranks if found.boxes_of(rank, shape)]
    assert sorted(found.ranks_meeting(shape, whole(shape)).tolist()) == sorted(having)
    assert found.num_boxes(shape) * found.num_copies == sum(len(found.boxes_of(rank, shape)) for rank in having)
    assert MeshLayout.from_json(found.to_json()) == found


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
