"""Of a large index each rank reads the parts alone that have what it needs."""

from __future__ import annotations

from pathlib import Path

import pytest
from forked_ranks import run_ranks
from own_parts_worker import load_in_other_layouts, load_own_parts, train_with_own_parts
from test_state_parallel import assert_same_curves

from ckptstore.state.index.outline import INDEX_NAME

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
ALL = [0, 1, 2, 3]


def test_own_parts_are_read_and_more_only_where_they_are_needed(tmp_path: Path) -> None:
    found = run_ranks(4, load_own_parts, str(tmp_path / "store"), timeout_seconds=240)
    for rank, one in enumerate(found):
        own = sorted({0, rank, *([2] if rank == 3 else [])})  # rank 0 has what all have, rank 2 what its stage has
        assert one["same"] == ([own], True)
        assert one["node"] == ([own], True)
        assert one["job"] == ([own], True)
        assert one["columns"] == ([ALL], True)
        assert one["unplaced"] == ([own], True)
        opened, said = one["missing"]
        assert opened == [sorted({0, rank})]
        assert "missing in the checkpoint: other" in said
        opened, said = one["unexpected"]
        assert opened == [sorted({0, rank})]
        assert "without a place in the state: stage1.bias" in said
        assert "the part of rank 2 is lost to rank 3" in one["lost"][1], "all ranks are told"
        assert INDEX_NAME in one["damaged"]
        assert "damaged" in one["damaged"]


@pytest.mark.slow
def test_training_goes_on_with_own_parts(tmp_path: Path) -> None:
    found = run_ranks(2, train_with_own_parts, str(tmp_path), ["fsdp2", "fsdp1"], timeout_seconds=240)
    assert_same_curves([curves for curves, _ in found])
    (_, of_leader), (_, of_other) = found
    assert of_leader == [[0]] * 4, "of FSDP1 no rule says which rank has what, but its own part has all that it needs"
    assert of_other == [[0, 1]] * 4


@pytest.mark.slow
def test_other_layouts_are_loaded_with_the_parts_that_they_need(tmp_path: Path) -> None:
    (not_equal, of_leader), (_, of_other) = run_ranks(2, load_in_other_layouts, str(tmp_path), timeout_seconds=240)
    assert not_equal == {"ddp": [], "fsdp1": [], "fsdp2": []}
    assert of_leader == [[0, 1], [0], [0]], "the rows of FSDP1 are those of FSDP2"
    assert of_other == [[0, 1]] * 3
