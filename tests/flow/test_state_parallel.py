"""Real training in real processes: bit-equal curves after a resume, and any layout loaded into any other."""

from __future__ import annotations

from pathlib import Path

import pytest
from forked_ranks import run_ranks
from state_worker import load_as, save_as, shares_values_and_samples, train_and_resume

pytestmark = pytest.mark.timeout(600)


def assert_same_curves(results: list[dict[str, tuple[list[float], list[float], list[float]]]]) -> None:
    for of_rank in results:
        for layout, (whole, from_sync, from_async) in of_rank.items():
            assert from_sync == whole, layout
            assert from_async == whole[2:], layout


@pytest.mark.parametrize("layouts", [["ddp", "fsdp2"], pytest.param(["fsdp1", "tp"], marks=pytest.mark.slow)], ids=str)
def test_training_goes_on_as_if_never_interrupted(tmp_path: Path, layouts: list[str]) -> None:
    results = run_ranks(2, train_and_resume, str(tmp_path), layouts)
    assert set(results[0]) == set(layouts)
    assert_same_curves(results)
    if "ddp" in layouts:
        assert results[0]["ddp"] != results[1]["ddp"]


@pytest.mark.long
def test_ddp_of_two_into_other_layouts(tmp_path: Path) -> None:
    root = str(tmp_path / "store")
    expected = run_ranks(2, save_as, root, "ddp")[0]
    assert run_ranks(1, load_as, root, ["plain"], ["rank"], expected) == [{"plain": []}]
    wanted = ["fsdp2", "fsdp1", "ddp"]
    assert run_ranks(2, load_as, root, wanted, ["node", "rank", "job"], expected)[0] == {key: [] for key in wanted}


@pytest.mark.parametrize(
    ("saved", "num_ranks", "loaded"),
    [
        pytest.param("fsdp2", 4, {1: ["plain"], 2: ["fsdp2", "ddp", "fsdp1"]}, marks=pytest.mark.long),
        pytest.param("fsdp1", 2, {4: ["hsdp", "fsdp2"]}, marks=pytest.mark.long),
        pytest.param("hsdp", 4, {2: ["ddp", "fsdp1", "fsdp2"]}, marks=pytest.mark.slow),
    ],
)
def test_resharding(tmp_path: Path, saved: str, num_ranks: int, loaded: dict[int, list[str]]) -> None:
    """Each layout is saved, each is loaded, to fewer ranks and to more; other pairs are in tests/state."""
    root = str(tmp_path / "store")
    expected = run_ranks(num_ranks, save_as, root, saved, timeout_seconds=240)[0]
    for world_size, layouts in loaded.items():
        found = run_ranks(world_size, load_as, root, layouts, ["rank", "job", "node"], expected, timeout_seconds=240)
        assert found[0] == {key: [] for key in layouts}


def test_what_ranks_share_what_differs_and_data_loaders(tmp_path: Path) -> None:
    """A tensor that all have is split, what differs is kept for each, and each sample is given once over a resume."""
    for share, is_kept, (before, after, due) in run_ranks(2, shares_values_and_samples, str(tmp_path)):
        assert abs(share - 0.5) < 0.02
        assert is_kept
        assert before + after == due
        assert len(set(before) & set(after)) == 0
