"""The whole way through a store: a training that stops and goes on is the one that never stopped, in any layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from forked_ranks import run_ranks

LAYOUTS = ("ddp", "fsdp1", "fsdp1-flat", "fsdp2", "tensor-parallel")
FOUR_RANKS = ("ddp", "fsdp1", "fsdp2", "fsdp1-hybrid", "hsdp2")
QUIET = {"PYTHONWARNINGS": "ignore"}


def stop_and_go_on(directory: Path, layouts: tuple[str, ...]) -> None:
    """Save in the middle of a training, go on, and hold that each layout resumes it to the same numbers."""
    import layouts as given
    import torch
    from carrier import bits

    import ckptstore

    rank = given.start()
    for layout in layouts:
        with ckptstore.open_store(directory / layout) as store:
            run = given.Run(layout)
            run.steps(3)
            store.save(3, {**run.state, "rng": torch.get_rng_state(), "epoch": 3, "own": rank})
            buffers = bits(dict(run.model.named_buffers()))
            curve, end = run.steps(3), whole(run)
            for other in layouts:
                again = given.Run(other)
                # DDP sums in another order once it has seen a backward pass, and four addends round differently then.
                again.model(torch.randn(4, given.SIZES[0])).sum().backward()
                state: dict[str, Any] = {**again.state, "rng": torch.get_rng_state(), "epoch": 0, "own": None}
                store.load(state)
                torch.set_rng_state(state["rng"])
                assert (state["epoch"], state["own"], again.scheduler.last_epoch) == (3, rank, 3)
                if other == layout and layout != "ddp":  # under DDP rank 0's count
                    assert bits(dict(again.model.named_buffers())) == buffers, layout
                seen = again.steps(3)
                if not any("tensor" in name for name in (layout, other)):  # other layouts sum in another order
                    assert seen == pytest.approx(curve, rel=1e-3), (layout, other)
                if other == layout:
                    assert seen == curve, layout
                    assert whole(again) == end, layout
    given.finish()


def whole(run: Any) -> dict[str, Any]:
    """All tensors of a run but the norm's buffers, which are each rank's own."""
    import layouts as given
    from carrier import bits

    from ckptstore.state.live.apply import collect

    tensors = collect(run.state).tensors
    return {key: bits(given.full(entry.tensor)) for key, entry in tensors.items() if "norm.running" not in key}


def on_fewer_ranks(directory: Path, layouts: tuple[str, ...]) -> None:
    """What ranks had of their own is refused by name, unless it is said what shall become of it."""
    import layouts as given
    import torch

    import ckptstore

    given.start()
    for layout in layouts:
        with ckptstore.open_store(directory / layout) as store:
            run = given.Run("fsdp2")
            before = run.model.block.norm.running_mean.clone()
            state = {**run.state, "epoch": 0, "own": -1, "rng": torch.get_rng_state()}
            with pytest.raises(ckptstore.StateMismatch, match=r"had its own .*\bown\b"):
                store.load(state)
            assert (state["epoch"], not run.optimizer.state) == (0, True)
            part = {"epoch": 0}
            store.load(part)
            assert part == {"epoch": 3}, "what nobody asks for may differ"
            store.load(state, include="epoch")
            assert (state["epoch"], state["own"]) == (3, -1)
            state["epoch"] = 0
            store.load(state, per_rank="skip")
            assert (state["epoch"], state["own"]) == (3, -1)
            if layout.startswith("fsdp"):  # under DDP rank 0's count, tensor parallel ranks have the same
                assert torch.equal(run.model.block.norm.running_mean, before)
            assert len(run.optimizer.state) == 7
            state = {**run.state, "epoch": 0, "own": -1, "rng": torch.get_rng_state()}
            store.load(state, per_rank="first")
            assert (state["epoch"], state["own"]) == (3, 0)
            latest = store.latest()
            assert latest is not None
            assert latest.per_rank("own") == list(range(latest.world_size))
    given.finish()


@pytest.mark.slow
def test_two_ranks_in_every_layout_and_one_rank_after_them(tmp_path: Path) -> None:
    run_ranks(2, stop_and_go_on, tmp_path, LAYOUTS, timeout_seconds=240, env=QUIET)
    run_ranks(1, on_fewer_ranks, tmp_path, LAYOUTS, timeout_seconds=120, env=QUIET)


@pytest.mark.slow
@pytest.mark.timeout(700)
def test_four_ranks_in_every_layout_and_two_after_them(tmp_path: Path) -> None:
    run_ranks(4, stop_and_go_on, tmp_path, FOUR_RANKS, timeout_seconds=500, env=QUIET)
    run_ranks(2, on_fewer_ranks, tmp_path, FOUR_RANKS, timeout_seconds=120, env=QUIET)
