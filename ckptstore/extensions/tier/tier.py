"""The options of the fast tier: its directory on a node, the number of copies, which checkpoints reach the store."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

from ckptstore.errors import InvalidInput
from ckptstore.extensions.tier.certificate import is_node_name
from ckptstore.retention import Candidate, KeepWithin, Policy
from ckptstore.storage.uri import local_path


@dataclass(frozen=True, slots=True)
class FastTier:
    """Save to a disk of the node first, and bring checkpoints into the store behind the training.

    A save is complete when it is on the disks of the nodes; `docs/explain/how-the-fast-tier-works.md` says what a
    failure then costs. All ranks pass the same options, except `path` and `node`.
    """

    path: str | os.PathLike[str]
    """A directory on a disk of this node, created if absent. It must belong to this user alone (mode 700)."""
    copies: Literal[1, 2] = 1
    """The number of nodes on which each file lies. Two need at least two nodes, which reach each other by TCP."""
    keep: int = 2
    """The number of fast checkpoints that stay on a node, whether or not they are in the store."""
    drain: Policy | None = None
    """The policy that chooses the fast checkpoints to bring into the store: each that it keeps next to the last one so
    chosen. `KeepEvery(steps=1000)` chooses the first of every 1000 steps. None: the newest, whenever the drain before
    it has ended."""
    drain_bytes_per_second: float | None = None
    """The most bytes per second that a node sends to the store, all its ranks together; None for no limit."""
    interface: str | None = None
    """The network interface by which the other nodes reach this one. None for all interfaces: the others then first try
    the address by which this machine reaches other machines."""
    node: str | None = None
    """The name of this node; None for its name in the job's group."""

    def __post_init__(self) -> None:
        path: object = self.path  # a caller may have passed any type
        drain: object = self.drain
        rate: object = self.drain_bytes_per_second
        if not isinstance(path, str | os.PathLike) or not os.fspath(path):
            raise InvalidInput(f"The path of a fast tier is {path!r}, it must be that of a directory")
        object.__setattr__(self, "path", local_path(path, "The path of a fast tier"))
        if self.copies not in (1, 2):
            raise InvalidInput(f"copies is {self.copies!r}, it is 1 or 2")
        if type(self.keep) is not int or self.keep < 1:
            raise InvalidInput(f"keep is {self.keep!r}, and the newest fast checkpoint always stays")
        if drain is not None and (
            not isinstance(drain, Policy) or drain.compares_times() or drain.thins() or isinstance(drain, KeepWithin)
        ):
            raise InvalidInput(
                f"drain is {drain!r}, it is a policy that compares no times and no sizes and drops no keys, or None"
            )
        if rate is not None and (isinstance(rate, bool) or not isinstance(rate, int | float) or not rate > 0):
            raise InvalidInput(f"drain_bytes_per_second is {rate!r}, it must be above 0")
        if self.node is not None and not is_node_name(self.node):
            raise InvalidInput(f"{self.node!r} cannot be the name of a node: letters, digits and . _ : @ + - can")

    def is_due(self, candidate: Candidate, last: Candidate | None) -> bool:
        """Return True if a fast checkpoint is to be brought into the store; `last` is the last one that was."""
        if self.drain is None or last is None:
            return True
        return candidate.number in self.drain.kept([last, candidate])
