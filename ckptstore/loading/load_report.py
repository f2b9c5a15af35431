"""What a load is asked for and what it says, as values that need no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ReadOnce = Literal["rank", "node", "job"]
"""Who reads bytes that several ranks need: each of them, one process of each node, or one of the job."""

Dtype = Literal["same", "state"]
"""Whether a tensor must have been saved in the dtype that the state has, or is cast to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """What did not fit, over all ranks. After a strict load nothing is missing or unexpected."""

    missing: tuple[str, ...]
    """Keys of the state that the checkpoint does not have; they were left as they are."""
    unexpected: tuple[str, ...]
    """Keys of the checkpoint, below names of the state, that found no place."""
    passed_over: tuple[str, ...] = ()
    """Checkpoints that a resume could not use, each with the reason. A warning and an event told of each as well."""
    remade: tuple[str, ...] = ()
    """On this rank: buffers outside of the state that modules from the meta device made anew."""
    left_on_meta: tuple[str, ...] = ()
    """On this rank: buffers outside of the state that are still on the meta device. A forward pass needs them."""
