"""The matrix: layouts by layouts by optimizers. What was saved is what is loaded, and training goes on bit by bit."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
from matrix import OPTIMIZERS, matrix

from ckptstore.testing import run_ranks

sys.path.insert(0, str(Path(__file__).parents[1]))
import independent_reader as reader

TWO_RANKS = ["plain", "ddp", "fsdp1", "fsdp2", "tensor-parallel"]
FOUR_RANKS = ["hsdp2", "fsdp1-hybrid", "tensor-parallel-fsdp2"]
QUIET = {"PYTHONWARNINGS": "ignore"}
NOT_IN_TORCH = {
    "adafactor": {"fsdp2", "tensor-parallel", "hsdp2", "tensor-parallel-fsdp2"},
    "rprop": {"fsdp2", "tensor-parallel", "hsdp2", "tensor-parallel-fsdp2"},
    "several": {"fsdp1", "fsdp1-hybrid"},
}
"""Layouts in which torch cannot train with an optimizer: some do not know DTensors, and FSDP1 shows flat pieces of
parameters, of which Muon takes none."""
REFUSED = {("adafactor", layout) for layout in ("fsdp1", "fsdp1-hybrid")}
"""Its statistics of flat pieces are not those of the parameters, and a step without gradients divides by zero."""


def is_known(name: str, words: str) -> bool:
    """Whether a case is one that torch does not support, or one that was refused by name."""
    *layouts, optimizer = name.replace("->", "").split()
    if len(layouts) == 1:
        return words.startswith("torch: ") and layouts[0] in NOT_IN_TORCH.get(optimizer, ())
    return words.startswith("StateMismatch: the ") and any((optimizer, layout) in REFUSED for layout in layouts)


def is_own(key: Any) -> bool:
    """Whether the independent reader gives what one rank has for itself under this key: (key, rank)."""
    return isinstance(key, tuple)


def check(found: list[dict[str, str]], directory: Path) -> None:
    """Nothing was wrong on any rank, and a program that knows the format page reads every checkpoint."""
    for told in found:
        assert {name: words for name, words in told.items() if not is_known(name, words)} == {}
    for path in sorted(directory.glob("*.saved")):
        root, saved = path.with_suffix(""), pickle.loads(path.read_bytes())
        tensors, values = reader.read_checkpoint(root, reader.read_log(root / "log")[-1])
        assert any(str(key).startswith("optim0.param_groups.") for key in values)
        compared = [key for key in saved if key in tensors]
        assert len(compared) >= 7
        for key in compared:
            dtype, shape, content = saved[key]
            assert tensors[key] == (dtype.removeprefix("torch."), shape, content), (root.name, key)
        lost = saved.keys() - tensors.keys() - values.keys() - {key for key, *_ in filter(is_own, [*tensors, *values])}
        assert lost == set(), root.name


def test_a_sample(tmp_path: Path) -> None:
    check(run_ranks(2, matrix, tmp_path, ["fsdp2", "ddp"], ["fsdp2", "ddp"], ["several"], env=QUIET), tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_layout_and_optimizer_on_two_ranks(tmp_path: Path) -> None:
    layouts = run_ranks(2, matrix, tmp_path, TWO_RANKS, TWO_RANKS, list(OPTIMIZERS), timeout_seconds=500, env=QUIET)
    check(layouts, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_layout_and_optimizer_on_four_ranks(tmp_path: Path) -> None:
    layouts = run_ranks(4, matrix, tmp_path, FOUR_RANKS, FOUR_RANKS, list(OPTIMIZERS), timeout_seconds=500, env=QUIET)
    check(layouts, tmp_path)
