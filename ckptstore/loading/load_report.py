"""The options and the report of a load, as values that need no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
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
    cast: Mapping[str, str] = field(default_factory=dict)
    """On this rank: for the keys that dtype="state" has cast, from what and to what."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadCheck:
    """The answer to the question whether a state can be loaded from a checkpoint."""

    step: int
    problem: str
    """The error that a load would raise, in words; empty if it would succeed."""
    missing: tuple[str, ...]
    """The keys of the state that the checkpoint does not have."""
    unexpected: tuple[str, ...]
    """The keys of the checkpoint, below names of the state, that the state does not have."""
    differing: Mapping[str, str] = field(default_factory=dict)
    """The difference, for keys that both have."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """For missing keys, the unexpected one that may be meant: of the same dtype and shape, with the nearest name."""
    cast: Mapping[str, str] = field(default_factory=dict)
    """For keys that a load with dtype="state" casts, from what and to what."""
    left_out: tuple[str, ...] = ()
    """The parts of the checkpoint that the state does not name, such as "optimizer"; they would not be loaded."""
    num_tied: int = 0
    """The number of tensors that the checkpoint has apart and the state in one memory. A load compares their bytes, and
    refuses those that differ; this answer does not."""

    @property
    def fits(self) -> bool:
        """True if a load would succeed."""
        return not self.problem
