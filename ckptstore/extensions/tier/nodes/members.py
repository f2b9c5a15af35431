"""The nodes of the ranks of a job, the reporter of each node, and the partner of each node. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Members:
    """The ranks of a job on their nodes, as one of them sees them."""

    nodes: tuple[str, ...]
    """The name of the node of each rank, in the order of the ranks."""
    rank: int
    """The rank of this process."""

    @property
    def node(self) -> str:
        """The node of this process."""
        return self.nodes[self.rank]

    @cached_property
    def all_nodes(self) -> tuple[str, ...]:
        """Every node once, in the order of their lowest ranks."""
        return tuple(dict.fromkeys(self.nodes))

    @cached_property
    def _ranks(self) -> dict[str, tuple[int, ...]]:
        found: dict[str, list[int]] = {}
        for rank, node in enumerate(self.nodes):
            found.setdefault(node, []).append(rank)
        return {node: tuple(ranks) for node, ranks in found.items()}

    def ranks_of(self, node: str) -> tuple[int, ...]:
        """Return the ranks on a node, ascending."""
        return self._ranks[node]

    def reporter_of(self, node: str) -> int:
        """Return the rank that looks at the node's disk, certifies and deletes on it: the lowest one."""
        return self._ranks[node][0]

    @property
    def is_reporter(self) -> bool:
        """True if this process is the reporter of its node."""
        return self.reporter_of(self.node) == self.rank

    def partner_of(self, node: str) -> str:
        """Return the node that holds second copies of a node's files: the next one of a ring. One node is its own."""
        return self.all_nodes[(self.all_nodes.index(node) + 1) % len(self.all_nodes)]
