"""What a checkpoint and a store say of themselves, in Python and on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from thread_ranks import run_threads
from torch import nn

from ckptstore import CheckpointStore, InvalidInput, open_store
from ckptstore.tools.cli import main


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two ranks: a tensor that both have, tied ones, one that each has of its own, and plain values."""
    tied = nn.ModuleDict({"a": nn.Linear(2, 3, bias=False), "b": nn.Linear(2, 3, bias=False)})
    tied["b"].weight = tied["a"].weight

    def flow(store: CheckpointStore, rank: int) -> None:
        own = torch.full((rank + 2,), rank)
        big = torch.ones(1_000_000, 2, dtype=torch.bfloat16)
        store.save(1, {"model": tied, "big": big, "own": own, "epoch": 1, "mine": rank}, metrics={"<loss>": 0.5})

    assert run_threads(2, tmp_path / "store", flow) == [None, None]
    return tmp_path / "store"


def test_the_tensors_of_a_checkpoint(root: Path) -> None:
    with open_store(root) as store:
        tensors = store[1].tensors
        assert list(tensors) == ["big", "model.a.weight", "model.b.weight", "own"]
        big = tensors["big"]
        assert (big.dtype, big.shape, big.size_bytes, big.ranks) == ("bfloat16", (1_000_000, 2), 4_000_000, (0, 1))
        assert set(big.files) <= {receipt.name for receipt in store[1].files}
        assert len(big.files) == 2
        assert tensors["model.b.weight"].files == tensors["model.a.weight"].files
        own = tensors["own"]
        assert (own.is_per_rank, own.shape, own.ranks, big.is_per_rank) == (True, (2,), (0, 1), False)
        assert store[1].keys() == ["big", "epoch", "mine", "model.a.weight", "model.b.weight", "own"]
        with pytest.raises(KeyError, match=r"did you mean 'model\.a\.weight'"):
            tensors["model.a.wieght"]
        assert "missing" not in tensors


def test_a_store_has_a_length_and_is_true(root: Path, tmp_path: Path) -> None:
    with open_store(root) as store, open_store(tmp_path / "empty") as empty:
        assert (len(store), len(empty)) == (1, 0)
        assert empty
        for text in (store._repr_html_(), store[1]._repr_html_()):
            assert "<table>" in text
            assert "&lt;loss&gt;" in text
            assert "<loss>" not in text
        (tmp_path / "d").mkdir()
        checkpoint = empty.save_directory(1, tmp_path / "d")
        with pytest.raises(InvalidInput, match="directory checkpoint"):
            checkpoint.keys()


def test_show_lists_tensors(root: Path) -> None:
    def show(*arguments: str, code: int = 0) -> Any:
        result = CliRunner().invoke(main, ["show", f"{root}@1", *arguments])
        assert result.exit_code == code, result.output
        return result

    lines = show("--tensors").stdout.splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith("tensor "))
    cells = [line.split() for line in lines[start + 1 :]]
    assert [row[:5] for row in cells] == [
        ["big", "bfloat16", "1000000x2", "3.8", "MiB"],
        ["model.a.weight", "float32", "3x2", "24", "B"],
        ["model.b.weight", "float32", "3x2", "24", "B"],
        ["own", "int64", "2", "16", "B"],
    ]
    assert cells[0][5:] == ["0-1"]
    assert cells[1][5:] in (["0"], ["1"])
    assert cells[3][5:] == ["0-1,", "each", "its", "own"]
    assert "model.a.weight" not in show("--tensors", "own").stdout
    assert "did you mean 'model.*'" in show("--tensors", "modle.*", code=2).stderr
