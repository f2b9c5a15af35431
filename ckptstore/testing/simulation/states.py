"""Small states for the jobs of a run, which tell what they belong to."""

from __future__ import annotations

from typing import Any

import torch

from ckptstore.testing.simulation.model import Tag, payload, told_in

WEIGHTS = 200


def state_of(tag: Tag, rank: int) -> dict[str, Any]:
    """What one rank saves: weights that hardly change, and a text and a tensor that tell whose they are."""
    text = bytearray(payload(tag, rank, "own", 40))
    return {
        "model": {"weights": torch.arange(WEIGHTS, dtype=torch.float32), "bias": torch.full((4,), float(tag[1]))},
        "own": torch.frombuffer(text, dtype=torch.uint8),
        "step": tag[1],
    }


def empty_state() -> dict[str, Any]:
    """What a state is loaded into."""
    return {
        "model": {"weights": torch.zeros(WEIGHTS), "bias": torch.zeros(4)},
        "own": torch.zeros(40, dtype=torch.uint8),
        "step": -1,
    }


def problem_of(state: dict[str, Any], tag: Tag) -> str | None:
    """What is not as it was saved; None if all is well."""
    if not torch.equal(state["model"]["weights"], torch.arange(WEIGHTS, dtype=torch.float32)):
        return "the weights are others"
    if state["step"] != tag[1] or not torch.equal(state["model"]["bias"], torch.full((4,), float(tag[1]))):
        return f"step {state['step']}, bias {state['model']['bias'].tolist()}, {tag} was saved"
    if told_in(bytes(state["own"].tolist()))[:1] not in [[(tag, rank)] for rank in range(16)]:
        return f"{state['own']!r} was not saved by {tag}"
    return None
