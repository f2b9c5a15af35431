"""A node is about to be taken away: one more save, if there is time for it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from ckptstore.checkpoint import Checkpoint

MARGIN = 1.5
"""How many times the longest save so far the deadline must leave."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreemptionSave:
    """What became of a notice that nodes are taken away; the same on all ranks."""

    checkpoint: Checkpoint | None
    """What was saved in time; None when the save was skipped."""
    reason: str
    """Why it was skipped, "" when it was not."""
    node_ids: tuple[str, ...]
    """The nodes that go, by their ids in Ray."""
    ranks: tuple[int, ...]
    """The ranks on them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """A notice of Ray's, the same on all ranks."""

    deadline_seconds: float | None
    """Since the epoch; None when no deadline was told."""
    node_ids: tuple[str, ...]
    ranks: tuple[int, ...]

    def objection(self, *, needed_seconds: float) -> str:
        """Why a save is not worth a try, "" if it is. By the clock of the process that asks."""
        if self.deadline_seconds is None:
            return ""
        left_seconds = self.deadline_seconds - time.time()
        if left_seconds >= max(needed_seconds, 0.0):
            return ""
        return (
            f"{max(left_seconds, 0.0):.1f} s are left before {len(self.node_ids)} of the run's nodes go, "
            f"and a save needs {needed_seconds:.1f} s"
        )


def current_notice() -> Notice | None:
    """Ray's notice, None when there is none. A barrier of Ray's among the workers."""
    from ray.train import get_preemption_info

    told: Any = get_preemption_info()
    if told is None:
        return None
    deadline_seconds = told.deadline_ms / 1000 if told.deadline_ms else None  # 0 is Ray's word for none
    return Notice(
        deadline_seconds=deadline_seconds, node_ids=tuple(told.preempted_node_ids), ranks=tuple(told.preempted_ranks)
    )
