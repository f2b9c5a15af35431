"""Layouts that hypothesis draws: against torch's own cutting, and with JSON that was altered."""

from __future__ import annotations

import json
from math import prod
from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from ckptstore.state.tensors.boxes import REPLICATED, Cut, whole
from ckptstore.state.tensors.layouts import Mesh, MeshLayout


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
