"""Describe a job, its nodes and its bucket to the calculator. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from ckptstore.errors import InvalidInput

_ABOVE_ZERO = {"state_bytes", "disk_bytes_per_second", "network_bytes_per_second", "bucket_bytes_per_second"}
_ABOVE_ZERO |= {"bucket_total_bytes_per_second", "node_mtbf_seconds", "job_mtbf_seconds", "step_seconds"}
_SHARES = {"disk_survives_share", "several_nodes_share"}
_COUNTS = {"num_nodes", "ranks_per_node", "keep", "bucket_keep"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedJob:
    """A job, as far as its checkpoints go. Raises InvalidInput for what cannot be."""

    num_nodes: int
    state_bytes: float
    """The size of the whole state, over all ranks."""
    disk_bytes_per_second: float
    """The speed at which one node writes to its disk, and reads from it."""
    bucket_bytes_per_second: float
    """The speed at which one node writes to the bucket, and reads from it."""
    stall_seconds: float
    """The time for which one save holds the training up."""
    step_seconds: float
    """The time of one step of the training."""
    ranks_per_node: int = 1
    network_bytes_per_second: float | None = None
    """The speed at which one node sends to another, and receives at the same time; None without copies."""
    bucket_total_bytes_per_second: float | None = None
    """The speed of the bucket for all nodes together; None for as fast as all nodes can."""
    node_mtbf_seconds: float | None = None
    """The mean time between two failures of one node; None where nodes do not fail."""
    job_mtbf_seconds: float | None = None
    """The mean time between two failures of the job itself: all nodes stay, with their disks. None for none."""
    disk_survives_share: float = 0.0
    """The share of failures of nodes after which the node is in the job again, with what is on its disk."""
    several_nodes_share: float = 0.0
    """The share of failures of nodes that take several nodes at once, or move the job to other nodes."""
    restart_seconds: float = 0.0
    """From a failure until the job begins to load. No way to save shortens it."""
    node_hour_cost: float | None = None
    """The price of one node for an hour, in any currency."""
    keep: int = 2
    """The number of fast checkpoints that stay on the nodes."""
    bucket_keep: int = 3
    """The number of checkpoints that stay live in the bucket."""
    drain_seconds: float = 0.0
    """The time between two checkpoints that are brought into the bucket; 0 for as often as possible."""
    grace_seconds: float = 3600.0
    """The time that what retention drops stays in the bucket."""

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise InvalidInput(f"{item.name} is {value!r}, it must be a number")
            if item.name in _COUNTS and (value != int(value) or value < 1):
                raise InvalidInput(f"{item.name} is {value!r}, it must be a whole number from 1 on")
            if value < 0:
                raise InvalidInput(f"{item.name} is {value!r}, it must not be negative")
            if value == 0 and item.name in _ABOVE_ZERO:
                raise InvalidInput(f"{item.name} is {value!r}, it must be above 0")
            if item.name in _SHARES and value > 1:
                raise InvalidInput(f"{item.name} is {value!r}, it is a share from 0 to 1")
        if self.node_mtbf_seconds is None and self.job_mtbf_seconds is None:
            raise InvalidInput(
                "Nothing says how often the job fails",
                hint="Give the mean time between failures of one node, of the job, or both",
            )

    @property
    def bytes_per_node(self) -> float:
        """The part of the state on one node."""
        return self.state_bytes / self.num_nodes

    @property
    def bucket_seconds(self) -> float:
        """The time that the state takes to the bucket, or from it."""
        total = self.bucket_bytes_per_second * self.num_nodes
        return self.state_bytes / min(total, self.bucket_total_bytes_per_second or total)

    @property
    def node_failures_per_second(self) -> float:
        """The failures of all nodes together."""
        return self.num_nodes / self.node_mtbf_seconds if self.node_mtbf_seconds else 0.0

    @property
    def failures_per_second(self) -> float:
        """The failures of nodes and of the job itself."""
        return self.node_failures_per_second + (1 / self.job_mtbf_seconds if self.job_mtbf_seconds else 0.0)
