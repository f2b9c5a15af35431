"""What a caller asks for: where fast checkpoints lie on a node, how many copies there are, what reaches the store."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

from ckptstore.errors import InvalidInput
from ckptstore.fast.certificate import is_node_name
from ckptstore.retention import Candidate, Policy


@dataclass(frozen=True, slots=True)
class FastTier:
    """Save to a disk of the node first, and bring checkpoints into the store behind the training.

    A save is complete when it is on the disks of the nodes; see `docs/explain/how-the-fast-tier-works.md` for what a
    failure then costs. All ranks give the same, but for `path` and `node`.
    """

    path: str | os.PathLike[str]
    """A directory on a disk of this node, created if absent. It must belong to this user alone (mode 700)."""
    copies: Literal[1, 2] = 1
    """On how many nodes each file lies. Two need at least two nodes, which reach each other by TCP."""
    keep: int = 2
    """How many fast checkpoints stay on a node, whether or not they are in the store."""
    drain: Policy | None = None
    """Which fast checkpoints are brought into the store: those that the policy keeps beside the one that was last, so
    `KeepEvery(steps=1000)` for the first of every 1000 steps. None for the newest, whenever the one before is there."""
    drain_bytes_per_second: float | None = None
    """How fast a node reads and sends for that, all its ranks together; None for no limit."""
    interface: str | None = None
    """The network interface by which the other nodes reach this one; None for all, with those addresses first by which
    this machine reaches others."""
    node: str | None = None
    """The name of this node; None for the one that the job's group knows it by."""

    def __post_init__(self) -> None:
        path, drain, rate = _given(self.path), _given(self.drain), _given(self.drain_bytes_per_second)
        if not isinstance(path, str | os.PathLike) or not os.fspath(path):
            raise InvalidInput(f"The path of a fast tier is {path!r}, it must be that of a directory")
        if self.copies not in (1, 2):
            raise InvalidInput(f"copies is {self.copies!r}, it is 1 or 2")
        if type(self.keep) is not int or self.keep < 1:
            raise InvalidInput(f"keep is {self.keep!r}, and the newest fast checkpoint always stays")
        if drain is not None and (not isinstance(drain, Policy) or drain.compares_times()):
            raise InvalidInput(f"drain is {drain!r}, it is a policy that compares no times, or None")
        if rate is not None and (isinstance(rate, bool) or not isinstance(rate, int | float) or not rate > 0):
            raise InvalidInput(f"drain_bytes_per_second is {rate!r}, it must be above 0")
        if self.node is not None and not is_node_name(self.node):
            raise InvalidInput(f"{self.node!r} cannot be the name of a node: letters, digits and . _ : @ + - can")

    def is_due(self, candidate: Candidate, last: Candidate | None) -> bool:
        """Whether a fast checkpoint is brought into the store, by the one that was before."""
        if self.drain is None or last is None:
            return True
        return candidate.number in self.drain.kept([last, candidate])


def _given(value: object) -> object:
    """What a caller gave may be of any type."""
    return value
