"""Every parallel layout in real processes: the same names, any layout's checkpoint in any other, and exact resumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from forked_ranks import run_ranks

pytestmark = pytest.mark.slow

TWO_RANKS = ("plain", "ddp", "fsdp1", "fsdp1-flat", "fsdp2", "fsdp2-wrapped", "tensor-parallel")
MAIN = ("ddp", "fsdp1", "fsdp2")
QUIET = {"PYTHONWARNINGS": "ignore"}
"""FSDP1 and stock DCP warn of each other at each step."""
NEED_FOUR = ("ddp", "fsdp1-hybrid", "hsdp2", "tensor-parallel-fsdp2")
"""Layouts that two ranks cannot have, and what they are compared with."""
FOUR_RANKS = (*NEED_FOUR, "fsdp1", "fsdp2", "tensor-parallel")


def names_and_resumes(directory: Path, layouts: tuple[str, ...]) -> dict[str, Any]:
    """In each layout: train, save, go on; then resume a new run and hold that it goes the same way, bit for bit."""
    import layouts as given
    import torch
    from carrier import bits, load_with_dcp, save_with_dcp, training, unchanged_by

    from ckptstore.state.live.apply import collect
    from ckptstore.state.live.matching import Mismatch

    seen = {}
    for layout in layouts:
        run = given.Run(layout)
        fresh = unchanged_by(lambda run=run: collect(run.state), *training(run.model, run.optimizer))
        assert not [key for key in fresh.tensors if key.startswith("optim.")]
        assert not run.optimizer.state
        run.steps(3)
        flat = unchanged_by(
            lambda run=run, layout=layout: save_with_dcp(run.state, directory / layout),
            *training(run.model, run.optimizer),
        )
        random = torch.get_rng_state()
        # On its own rank each buffer comes back only through the project's files: stock DCP keeps one rank's.
        buffers = {name: buffer.clone() for name, buffer in run.model.named_buffers()}
        seen[layout] = {
            "tensors": {
                key: (str(entry.tensor.dtype), tuple(entry.tensor.shape)) for key, entry in flat.tensors.items()
            },
            "aliases": dict(flat.aliases),
            "values": sorted(flat.values),
            "replicated": sorted(key for key, entry in flat.tensors.items() if entry.replicated),
            "lowest": sorted(key for key, entry in flat.tensors.items() if entry.lowest_rank_counts),
            "whole": {key: given.full(entry.tensor) for key, entry in flat.tensors.items()},
        }
        seen[layout]["whole"] |= {key: seen[layout]["whole"][to] for key, to in flat.aliases.items()}
        curve = run.steps(3)
        end = {key: bits(given.full(entry.tensor)) for key, entry in collect(run.state).tensors.items()}

        again = given.Run(layout)
        again.model(torch.randn(4, given.SIZES[0])).sum().backward()
        gradients = [parameter.grad for parameter in again.model.parameters()]
        assert load_with_dcp(again.state, directory / layout) == Mismatch()
        assert all(
            parameter.grad is gradient for parameter, gradient in zip(again.model.parameters(), gradients, strict=True)
        )
        with torch.no_grad():
            for name, buffer in again.model.named_buffers():
                buffer.copy_(buffers[name])
        torch.set_rng_state(random)
        assert again.steps(3) == curve, layout
        assert {key: bits(given.full(entry.tensor)) for key, entry in collect(again.state).tensors.items()} == end
    return seen


def across(directory: Path, sources: tuple[str, ...], layouts: tuple[str, ...]) -> dict[str, Any]:
    """Load checkpoints of other layouts, of other numbers of ranks, into fresh runs; what they hold then."""
    import layouts as given
    from carrier import load_with_dcp

    from ckptstore.state.live.apply import collect
    from ckptstore.state.live.matching import Mismatch

    seen = {}
    for layout in layouts:
        for source in sources:
            run = given.Run(layout)
            assert load_with_dcp(run.state, directory / source) == Mismatch(), (source, layout)
            assert run.scheduler.last_epoch == 3
            flat = collect(run.state)
            seen[source, layout] = {key: given.full(entry.tensor) for key, entry in flat.tensors.items()}
            assert run.optimizer.param_groups[0]["lr"] == 0.005
    return seen


def in_ranks(
    directory: Path, made: tuple[str, ...], sources: tuple[str, ...], loaded: tuple[str, ...], cases: bool = False
) -> Any:
    """All in one group of processes, as these take long to start; with the cases that only show with several ranks."""
    import layouts as given
    import module_cases

    given.start()
    found = names_and_resumes(directory, made), across(directory, sources, loaded)
    for case in module_cases.CASES if cases else ():
        case(directory / case.__name__)
    given.finish()
    return found


def check_names(seen: list[dict[str, Any]], layouts: tuple[str, ...]) -> None:
    import torch

    plain = seen[0][layouts[0]]
    for rank in seen:
        for layout, found in rank.items():
            untied = {**found["tensors"], **{key: found["tensors"][to] for key, to in found["aliases"].items()}}
            expected = {**plain["tensors"], **{key: plain["tensors"][to] for key, to in plain["aliases"].items()}}
            assert untied == expected, layout
            assert found["values"] == plain["values"], layout
            if layout != "fsdp1-flat":  # a flat parameter hides what is tied in it
                assert found["aliases"] == {"model.last.weight": "model.first.weight"}, layout
            if layout != "ddp":
                assert not found["replicated"], layout
    buffers = [f"model.block.{name}" for name in ("norm.num_batches_tracked", "norm.running_mean", "norm.running_var")]
    assert set(seen[0]["ddp"]["replicated"]) == set(plain["tensors"])
    assert seen[0]["ddp"]["lowest"] == sorted([*buffers, "model.block.scale"])
    for key, tensor in seen[0]["ddp"]["whole"].items():
        same = all(torch.equal(tensor, rank["ddp"]["whole"][key]) for rank in seen)
        assert same or key in buffers, f"{key} is not replicated"


def check_across(seen: list[dict[str, Any]], sources: list[dict[str, Any]]) -> None:
    """Each tensor is what was saved; of buffers that differed between ranks stock DCP kept one."""
    import torch

    for rank in seen:
        for (source, layout), tensors in rank.items():
            for key, tensor in tensors.items():
                saved = [other[source]["whole"][key] for other in sources]
                assert any(torch.equal(tensor, one) for one in saved), (source, layout, key)


def test_two_ranks_and_their_special_cases(tmp_path: Path) -> None:
    found = run_ranks(2, in_ranks, tmp_path, TWO_RANKS, TWO_RANKS, MAIN, True, timeout_seconds=240, env=QUIET)
    saved = [seen for seen, _ in found]
    check_names(saved, TWO_RANKS)
    check_across([loaded for _, loaded in found], saved)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("on_four", "on_two", "alone"),
    [
        pytest.param(NEED_FOUR, MAIN, ("plain",), id="those that need four", marks=pytest.mark.slow),
        pytest.param(FOUR_RANKS, TWO_RANKS, ("plain", "fsdp2"), id="all", marks=pytest.mark.long),
    ],
)
def test_pairs_of_layouts_on_four_ranks_and_from_there_to_two_and_one(
    tmp_path: Path, on_four: tuple[str, ...], on_two: tuple[str, ...], alone: tuple[str, ...]
) -> None:
    found = run_ranks(4, in_ranks, tmp_path, on_four, on_four, on_four, timeout_seconds=290, env=QUIET)
    saved = [seen for seen, _ in found]
    check_names(saved, on_four)
    check_across([loaded for _, loaded in found], saved)
    for count, layouts in ((2, on_two), (1, alone)):
        found = run_ranks(count, in_ranks, tmp_path, (), on_four, layouts, timeout_seconds=290, env=QUIET)
        check_across([loaded for _, loaded in found], saved)
