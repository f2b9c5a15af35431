"""The matrix: layouts by layouts by optimizers. What was saved is what is loaded, and the next step of training is that
of the run that was not interrupted: bit by bit, but for what a layout itself changes in sums."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import independent_reader as reader
import pytest
import torch
from carrier import bits
from forked_ranks import run_ranks
from matrix import OPTIMIZERS, load_all, matrix, save_all

pytestmark = pytest.mark.slow

TWO_RANKS = ["plain", "ddp", "fsdp1", "fsdp1-flat", "fsdp2", "fsdp2-wrapped", "tensor-parallel"]
FOUR_RANKS = ["hsdp2", "fsdp1-hybrid", "tensor-parallel-fsdp2"]
ALONE = "alone"
"""One process without a group, which saves too, and loads what the others saved."""
WITHOUT_PARTS = {ALONE, "plain", "ddp"}
QUIET = {"PYTHONWARNINGS": "ignore"}
FSDP1 = {"fsdp1", "fsdp1-flat", "fsdp1-hybrid"}
DTENSORS = {"fsdp2", "fsdp2-wrapped", "tensor-parallel", "hsdp2", "tensor-parallel-fsdp2"}
NOT_IN_TORCH = {"adafactor": DTENSORS, "rprop": DTENSORS, "several": FSDP1, "groups": {"fsdp1-flat"}}
"""Layouts in which torch cannot train with an optimizer. Some do not know DTensors. FSDP1 shows flat pieces of
parameters, of which Muon takes none, and a flat parameter cannot be frozen in part."""
QUANTISED = {"adamw-8bit", "adamw-4bit", "adamw-fp8"}
DOES_NOT_FIT = "StateMismatch: the checkpoint does not fit the state: "
OTHER_SUMS = 5e-7
"""By how much a step may be off where one of two layouts adds in another order; 1.6e-7 was measured."""
OTHER_SUMS_BFLOAT16 = 5e-3
"""The same for Muon, which computes in bfloat16 and, with DTensors, part by part; 3.3e-3 was measured."""


@pytest.fixture(autouse=True)
def _as_in_the_ranks() -> Iterator[None]:
    """The process of the test is one of the layouts: several threads would sum in another order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch.compiler.set_stance("default")


def expected(name: str) -> str:
    """How what is said of a case must begin, "" if it must work."""
    *layouts, optimizer = name.replace("->", "").split()
    if len(layouts) == 1 and layouts[0] in NOT_IN_TORCH.get(optimizer, ()):
        return "torch: "
    if optimizer in QUANTISED and FSDP1 & set(layouts):
        is_save = len(layouts) == 1
        return (
            "InvalidState: the optimizer at 'optim0' has state in tensors that wrap others" if is_save else DOES_NOT_FIT
        )
    if optimizer == "adafactor" and len(layouts) == 2 and FSDP1 & set(layouts):
        return (
            "" if set(layouts) <= FSDP1 else DOES_NOT_FIT
        )  # its statistics of flat pieces are not those of parameters
    if optimizer in QUANTISED and len(set(layouts)) > 1 and not set(layouts) <= WITHOUT_PARTS:
        return DOES_NOT_FIT  # only torchao knows how to cut what it wraps
    return ""


def tolerance(name: str) -> float:
    """How far the step after a load may be off; 0 where each rank computes whole layers with whole parameters."""
    source, _, layout, optimizer = name.split()
    if source == layout:
        return 0.0
    if optimizer == "adafactor" and FSDP1 & {source, layout}:
        return float("inf")  # it scales by the norm of what it is shown, so that each kind of FSDP1 trains differently
    if optimizer == "several":
        return OTHER_SUMS_BFLOAT16
    return OTHER_SUMS if any("tensor" in one for one in (source, layout)) else 0.0


def is_right(name: str, said: str | float) -> bool:
    if words := expected(name):
        return isinstance(said, str) and said.startswith(words)
    return isinstance(said, float) and said <= tolerance(name)


def is_own(key: Any) -> bool:
    """Whether the independent reader gives what one rank has for itself under this key: (key, rank)."""
    return isinstance(key, tuple)


def check(found: list[dict[str, Any]], directory: Path) -> None:
    """Nothing was wrong on any rank, and a program that knows the format page reads every checkpoint."""
    for told in found:
        wrong = {name: said for name, said in told.items() if not is_right(name, said)}
        assert not wrong, "\n".join(f"{name}: {said}" for name, said in wrong.items())
    for path in sorted(directory.glob("*.0")):
        root, saved = path.with_suffix(""), torch.load(path)[0]
        tensors, values = reader.read_checkpoint(root, reader.read_log(root / "log")[-1])
        assert any(str(key).startswith("optim0.param_groups.") for key in values)
        compared = [key for key in saved if key in tensors]
        assert len(compared) >= 7
        for key in compared:
            dtype, shape, content = bits(saved[key])
            assert tensors[key] == (dtype.removeprefix("torch."), shape, content), (root.name, key)
        lost = saved.keys() - tensors.keys() - values.keys() - {key for key, *_ in filter(is_own, [*tensors, *values])}
        assert lost == set(), root.name


def check_matrix(ranks: int, directory: Path, layouts: list[str], optimizers: list[str]) -> None:
    """Every layout into every other, with one process without a group as one of them."""
    saved_alone = save_all(directory, [ALONE], optimizers)
    found = run_ranks(ranks, matrix, directory, layouts, layouts, optimizers, [ALONE], timeout_seconds=500, env=QUIET)
    loaded_alone = load_all(directory, [ALONE, *layouts], [ALONE], optimizers)
    cases = {name for told in (found[0], loaded_alone) for name in told if "->" in name}
    trained = {path.stem for path in directory.glob("*.0")}
    for source, layout, optimizer in itertools.product([ALONE, *layouts], [ALONE, *layouts], optimizers):
        is_trained = layout not in NOT_IN_TORCH.get(optimizer, ())
        assert (f"{source} -> {layout} {optimizer}" in cases) == (f"{source}-{optimizer}" in trained and is_trained)
    check([{**saved_alone, **loaded_alone, **told} for told in found], directory)


@pytest.mark.filterwarnings("ignore")  # torchao's, of what it finds on this machine
def test_layouts_of_each_kind(tmp_path: Path) -> None:
    check_matrix(2, tmp_path, ["ddp", "fsdp1-flat", "fsdp2-wrapped", "tensor-parallel"], ["adamw"])


@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("ranks", "layouts", "optimizers"),
    [
        pytest.param(2, TWO_RANKS, ["adamw"], id="layouts"),
        pytest.param(2, ["fsdp1", "fsdp2"], [name for name in OPTIMIZERS if name != "adamw"], id="optimizers"),
        pytest.param(4, FOUR_RANKS, ["adamw"], id="layouts that need four ranks"),
    ],
)
def test_every_layout_and_every_optimizer(
    tmp_path: Path, ranks: int, layouts: list[str], optimizers: list[str]
) -> None:
    """Not each with each, which takes four times as long."""
    check_matrix(ranks, tmp_path, layouts, optimizers)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore")
def test_every_layout_and_optimizer_on_two_ranks(tmp_path: Path) -> None:
    check_matrix(2, tmp_path, TWO_RANKS, list(OPTIMIZERS))


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore")
def test_every_layout_and_optimizer_on_four_ranks(tmp_path: Path) -> None:
    check_matrix(4, tmp_path, FOUR_RANKS, [name for name in OPTIMIZERS if name not in QUANTISED - {"adamw-8bit"}])
