"""Open the fast tier of a job: each rank finds its node, and every node marks the job that owns its disk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ckptstore.config import StoreConfig
from ckptstore.errors import InvalidInput
from ckptstore.extensions.peers.channel import NodeKeys
from ckptstore.extensions.tier.nodes.members import Members
from ckptstore.extensions.tier.nodes.node_disk import NodeDisk
from ckptstore.extensions.tier.nodes.node_server import NodeClient, NodeServer
from ckptstore.extensions.tier.tier import FastTier
from ckptstore.format.timings import clean_node
from ckptstore.group import Group


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


def come(
    tier: FastTier, members: Members, config: StoreConfig, agreed: Mapping[str, Any], keys: NodeKeys
) -> tuple[NodeDisk, NodeServer | None]:
    """Open the disk of this node, before the addresses of the other nodes are known.

    `agreed` is the reply of the leader: "store_id", "epoch", "is_one_machine", "job" and the public "keys" of all
    ranks. The reporter of a node also marks the epoch of the job on the disk, and serves its files if there are other
    nodes. Raises the errors of `NodeDisk` and `NodeServer`.
    """
    keys.of_ranks, keys.job = agreed["keys"], agreed["job"]
    disk = NodeDisk.open(
        tier.path,
        agreed["store_id"],
        node=members.node,
        durable=config.transfer.durable,
        direct_io=config.transfer.direct_io,
    )
    if members.is_reporter:
        disk.mark_epoch(agreed["epoch"])
    if not members.is_reporter or len(members.all_nodes) == 1:
        return disk, None
    server = NodeServer(
        disk,
        keys,
        interface=tier.interface,
        is_one_machine=agreed["is_one_machine"],
        timeout_seconds=_patience_seconds(config),
    )
    return disk, server


def clients_of(
    addresses: Mapping[str, Sequence[Sequence[Any]]], members: Members, config: StoreConfig, keys: NodeKeys
) -> dict[str, NodeClient]:
    """Return the clients of the other nodes, which reach them at these addresses."""
    return {
        node: NodeClient(
            node,
            [(host, port) for host, port in found],
            keys,
            rank=members.rank,
            server_rank=members.reporter_of(node),
            timeout_seconds=_patience_seconds(config),
        )
        for node, found in addresses.items()
        if node != members.node
    }


def _patience_seconds(config: StoreConfig) -> float:
    """Return the longest silence of a node: less than the time for which a rank waits for another one."""
    return config.rank_timeout_seconds / 4


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
