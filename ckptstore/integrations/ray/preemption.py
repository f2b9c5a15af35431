"""Save once more before nodes are taken away, if there is time for it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from ckptstore.checkpoint import Checkpoint

MARGIN = 1.5
"""The deadline must leave this multiple of the longest save so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreemptionSave:
    """The outcome of a notice that nodes are taken away; the same on all ranks."""

    checkpoint: Checkpoint | None
    """The checkpoint that was saved in time; None when the save was skipped."""
    reason: str
    """The reason for skipping, "" when it was saved."""
    node_ids: tuple[str, ...]
    """The nodes that go, by their ids in Ray."""
    ranks: tuple[int, ...]
    """The ranks on them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """A notice of Ray's, the same on all ranks."""

    deadline_seconds: float | None
    """Since the epoch; None without a deadline."""
    node_ids: tuple[str, ...]
    ranks: tuple[int, ...]

    def objection(self, *, needed_seconds: float) -> str:
        """Return the reason why a save is not worth a try, "" if it is. By the clock of the calling process."""
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
    """Return Ray's notice, None when there is none. A barrier of Ray's among the workers."""
    from ray.train import get_preemption_info

    info: Any = get_preemption_info()
    if info is None:
        return None
    deadline_seconds = info.deadline_ms / 1000 if info.deadline_ms else None  # 0 is Ray's word for none
    return Notice(
        deadline_seconds=deadline_seconds, node_ids=tuple(info.preempted_node_ids), ranks=tuple(info.preempted_ranks)
    )
