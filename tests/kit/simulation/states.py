"""Small states for the jobs of a run, which name their saves."""

from __future__ import annotations

from typing import Any

import torch

from kit.simulation.model import Tag, calls_in, payload

WEIGHTS = 1_100
"""Enough that a file of them is taken over by an incremental save."""


def state_of(tag: Tag, rank: int) -> dict[str, Any]:
    """Return the state of one rank: weights that hardly change, and a text and a tensor that name its save."""
    text = bytearray(payload(tag, rank, "own", 40))
    return {
        "model": {"weights": torch.arange(WEIGHTS, dtype=torch.float32), "bias": torch.full((4,), float(tag[1]))},
        "own": torch.frombuffer(text, dtype=torch.uint8),
        "step": tag[1],
    }


def empty_state() -> dict[str, Any]:
    """Return a state to load into."""
    return {
        "model": {"weights": torch.zeros(WEIGHTS), "bias": torch.zeros(4)},
        "own": torch.zeros(40, dtype=torch.uint8),
        "step": -1,
    }


def problem_of(state: dict[str, Any], tag: Tag) -> str | None:
    """Return the difference from the saved state; None if there is none."""
    if not torch.equal(state["model"]["weights"], torch.arange(WEIGHTS, dtype=torch.float32)):
        return "the weights are others"
    if state["step"] != tag[1] or not torch.equal(state["model"]["bias"], torch.full((4,), float(tag[1]))):
        return f"step {state['step']}, bias {state['model']['bias'].tolist()}, {tag} was saved"
    if calls_in(bytes(state["own"].tolist()))[:1] not in [[(tag, rank)] for rank in range(16)]:
        return f"{state['own']!r} was not saved by {tag}"
    return None
