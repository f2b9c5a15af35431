"""The options and the report of a load, as values that need no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ReadOnce = Literal["rank", "node", "job"]
"""The readers of bytes that several ranks need: each of them, one process of each node, or one of the job."""

Dtype = Literal["same", "state"]
"""The rule for dtypes: with "same" a tensor must have been saved in the dtype of the state, with "state" it is cast."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """The keys that did not fit, over all ranks. After a strict load nothing is missing or unexpected."""

    missing: tuple[str, ...]
    """The keys of the state that the checkpoint does not have; they were left as they are."""
    unexpected: tuple[str, ...]
    """The keys of the checkpoint, below names of the state, that the state does not have."""
    left_out: tuple[str, ...] = ()
    """The parts of the checkpoint that the state of no rank names, such as "optimizer"; they were not loaded."""
    passed_over: tuple[str, ...] = ()
    """The checkpoints that a resume could not use, each with the reason. Each has caused a warning and an event too."""
    remade: tuple[str, ...] = ()
    """On this rank: the buffers outside of the state that modules from the meta device initialised themselves."""
    left_on_meta: tuple[str, ...] = ()
    """On this rank: the buffers outside of the state that are still on the meta device. A forward pass needs them."""
