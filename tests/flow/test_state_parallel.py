"""Real training in real processes: bit-equal curves after a resume, and any layout loaded into any other."""

from __future__ import annotations

from pathlib import Path

import pytest
from state_worker import load_as, loader_positions, same_key_other_value, save_as, split_bytes, train_and_resume

from ckptstore.testing import run_ranks

pytestmark = pytest.mark.timeout(600)


def assert_same_curves(results: list[dict[str, tuple[list[float], list[float], list[float]]]]) -> None:
    for of_rank in results:
        for layout, (whole, from_sync, from_async) in of_rank.items():
            assert from_sync == whole, layout
            assert from_async == whole[2:], layout


def test_training_goes_on_as_if_never_interrupted(tmp_path: Path) -> None:
    results = run_ranks(2, train_and_resume, str(tmp_path), ["ddp", "fsdp1", "fsdp2", "tp"])
    assert set(results[0]) == {"ddp", "fsdp1", "fsdp2", "tp"}
    assert_same_curves(results)
    assert results[0]["ddp"] != results[1]["ddp"]


@pytest.mark.slow
def test_ddp_of_two_into_other_layouts(tmp_path: Path) -> None:
    root = str(tmp_path / "store")
    expected = run_ranks(2, save_as, root, "ddp")[0]
    assert run_ranks(1, load_as, root, ["plain"], ["rank"], expected) == [{"plain": []}]
    wanted = ["fsdp2", "fsdp1", "ddp"]
    assert run_ranks(2, load_as, root, wanted, ["node", "rank", "job"], expected)[0] == {key: [] for key in wanted}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saved", "num_ranks", "loaded"),
    [
        ("fsdp2", 4, {1: ["plain"], 2: ["fsdp2", "ddp", "fsdp1"]}),
        ("fsdp1", 2, {4: ["hsdp", "fsdp2"]}),
        ("hsdp", 4, {2: ["ddp", "fsdp1", "fsdp2"]}),
    ],
)
def test_resharding(tmp_path: Path, saved: str, num_ranks: int, loaded: dict[int, list[str]]) -> None:
    """Each layout is saved, each is loaded, to fewer ranks and to more; other pairs are in tests/state."""
    root = str(tmp_path / "store")
    expected = run_ranks(num_ranks, save_as, root, saved, timeout_seconds=240)[0]
    for world_size, layouts in loaded.items():
        found = run_ranks(world_size, load_as, root, layouts, ["rank", "job", "node"], expected, timeout_seconds=240)
        assert found[0] == {key: [] for key in layouts}


def test_a_tensor_that_all_have_is_split_and_what_differs_is_kept_for_each(tmp_path: Path) -> None:
    shares = run_ranks(2, split_bytes, str(tmp_path / "split"))
    for share in shares:
        assert abs(share - 0.5) < 0.02
    assert run_ranks(2, same_key_other_value, str(tmp_path / "store"), True) == [True, True]
    assert run_ranks(1, same_key_other_value, str(tmp_path / "store"), False) == [True]


def test_a_data_loader_gives_each_sample_once_over_a_resume(tmp_path: Path) -> None:
    for before, after, due in run_ranks(2, loader_positions, str(tmp_path / "store")):
        assert before + after == due
        assert len(set(before) & set(after)) == 0
