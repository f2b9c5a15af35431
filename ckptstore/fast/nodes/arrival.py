"""Open the fast tier of a job: each rank finds its node, and every node marks the job that owns its disk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckptstore.config import StoreConfig
from ckptstore.errors import InvalidInput
from ckptstore.fast.nodes.fast_place import FastPlace
from ckptstore.fast.nodes.members import Members
from ckptstore.fast.nodes.node_disk import NodeDisk
from ckptstore.fast.nodes.node_server import NodeClient, NodeServer
from ckptstore.fast.tier import FastTier
from ckptstore.format.timings import clean_node
from ckptstore.group import Group
from ckptstore.peers.channel import NodeKeys
from ckptstore.transfer import Transfer


def offer(tier: FastTier, group: Group, keys: NodeKeys) -> dict[str, Any]:
    """Return the tier of this rank with its public key, as JSON for the leader."""
    same = {"copies": tier.copies, "keep": tier.keep, "drain": repr(tier.drain), "rate": tier.drain_bytes_per_second}
    return {"node": clean_node(tier.node or group.node), "machine": group.node, "same": same, "key": keys.public}


def agree(parts: Sequence[Mapping[str, Any]]) -> list[str]:
    """Leader: return the node of each rank.

    Raises InvalidInput when the tiers of the ranks differ, or two copies need more nodes.
    """
    first = parts[0]["same"]
    for rank, part in enumerate(parts):
        if part["same"] != first:
            raise InvalidInput(
                f"rank {rank} was given the fast tier {part['same']}, rank 0 {first}",
                ranks=(0, rank),
                hint="Only path and node may differ",
            )
    nodes = [part["node"] for part in parts]
    if first["copies"] == 2 and len(set(nodes)) == 1:
        raise InvalidInput(
            f"copies=2 needs two nodes, and all {len(nodes)} ranks are on {nodes[0]}",
            hint="Give copies=1: one node has nowhere to put a second copy",
        )
    return nodes


@dataclass(kw_only=True)
class Arrival:
    """A process that opens the disk of its node, before it knows the addresses of the other nodes."""

    tier: FastTier
    members: Members
    config: StoreConfig
    epoch: int
    claim: tuple[int, str]
    told: Mapping[str, Any]
    """The reply of the leader: "store_id", "is_one_machine", "job" and the public "keys" of all ranks."""
    keys: NodeKeys
    _server: NodeServer | None = None
    _disk: NodeDisk = field(init=False)
    """Set by `come`."""

    def come(self) -> dict[str, Any]:
        """Open the disk, and return its identity and the addresses of this node, as JSON for the leader.

        The reporter of a node also marks the epoch of the job on the disk, and serves its files if there are other
        nodes. Raises the errors of `NodeDisk` and `NodeServer`.
        """
        transfer, tier, told = self.config.transfer, self.tier, self.told
        self.keys.of_ranks, self.keys.job = told["keys"], told["job"]
        self._disk = disk = NodeDisk.open(
            tier.path,
            told["store_id"],
            node=self.members.node,
            durable=transfer.durable,
            direct_io=transfer.direct_io,
        )
        if self.members.is_reporter:
            disk.mark_epoch(self.epoch)
            if len(self.members.all_nodes) > 1:
                self._server = NodeServer(
                    disk,
                    self.keys,
                    interface=tier.interface,
                    is_one_machine=told["is_one_machine"],
                    timeout_seconds=self._patience_seconds,
                )
        return {"identity": disk.identity(), "addresses": self._server.addresses if self._server else []}

    @property
    def _patience_seconds(self) -> float:
        """The longest silence of a node: less than the time for which a rank waits for another one."""
        return self.config.rank_timeout_seconds / 4

    def enter(self, addresses: Mapping[str, Sequence[Sequence[Any]]]) -> FastPlace:
        """Return the fast tier of this process, which reaches the other nodes at these addresses."""
        config = self.config
        clients = {
            node: NodeClient(
                node,
                [(host, port) for host, port in found],
                self.keys,
                rank=self.members.rank,
                server_rank=self.members.reporter_of(node),
                timeout_seconds=self._patience_seconds,
            )
            for node, found in addresses.items()
            if node != self.members.node
        }
        return FastPlace(
            tier=self.tier,
            disk=self._disk,
            transfer=Transfer(self._disk.storage, config=config.transfer, retry=config.retry, rank=self.members.rank),
            members=self.members,
            claim_number=self.claim[0],
            claim_sha256=self.claim[1],
            epoch=self.epoch,
            server=self._server,
            clients=clients,
        )

    def leave(self) -> None:
        """Stop to serve: some rank could not open its disk."""
        if self._server is not None:
            self._server.close()


def join_arrivals(parts: Sequence[Mapping[str, Any]], members: Members, *, copies: int) -> dict[str, Any]:
    """Leader: return the addresses of each node.

    Raises InvalidInput when processes of one node have different directories, or two nodes have one for two copies.
    """
    owners: dict[tuple[Any, ...], str] = {}
    for node in members.all_nodes:
        first, *others = members.ranks_of(node)
        for rank in others:
            if list(parts[rank]["identity"]) != list(parts[first]["identity"]):
                raise InvalidInput(
                    f"Ranks {first} and {rank} are on {node} and were given different directories for fast checkpoints",
                    ranks=(first, rank),
                    hint="Give all processes of a node the same path, and each machine another FastTier(node=)",
                )
        owner = owners.setdefault(tuple(parts[first]["identity"]), node)
        if owner != node and copies == 2:
            raise InvalidInput(
                f"copies=2 needs two disks, and {owner} and {node} have one directory for fast checkpoints",
                ranks=(members.reporter_of(owner), first),
                hint="Put them on two machines, or give copies=1: the second copy would be lost with the first",
            )
    return {node: parts[members.reporter_of(node)]["addresses"] for node in members.all_nodes}
