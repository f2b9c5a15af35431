"""How the ranks of a job come to the fast tier: each finds its node, and every node says which job is there now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ckptstore.config import StoreConfig
from ckptstore.errors import InvalidInput
from ckptstore.fast.members import Members
from ckptstore.fast.node_disk import NodeDisk
from ckptstore.fast.place import FastPlace
from ckptstore.fast.tier import FastTier
from ckptstore.format.timings import clean_node
from ckptstore.group import Group
from ckptstore.transfer import Transfer


def asked(tier: FastTier, group: Group) -> dict[str, Any]:
    """What a rank tells the leader of the tier that it was given. As JSON."""
    same = {"copies": tier.copies, "keep": tier.keep, "drain": repr(tier.drain), "rate": tier.drain_bytes_per_second}
    return {"node": clean_node(tier.node or group.node), "same": same}


def agree(parts: Sequence[Mapping[str, Any]]) -> list[str]:
    """Leader: the node of each rank. Raises InvalidInput where the ranks were given different tiers, or two copies
    need more nodes."""
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


def check_shared_disks(parts: Sequence[Sequence[int]], nodes: Sequence[str]) -> None:
    """Leader: raise InvalidInput where processes of one node were given different directories."""
    first: dict[str, tuple[int, Sequence[int]]] = {}
    for rank, (node, identity) in enumerate(zip(nodes, parts, strict=True)):
        other, found = first.setdefault(node, (rank, identity))
        if list(found) != list(identity):
            raise InvalidInput(
                f"Ranks {other} and {rank} are on {node} and were given different directories for fast checkpoints",
                ranks=(other, rank),
                hint="Give all processes of a node the same path",
            )


def open_disk(tier: FastTier, store_id: str, members: Members, *, config: StoreConfig, epoch: int) -> NodeDisk:
    """The disk of this node, on which its reporter says that this job is there. Raises what `NodeDisk` raises."""
    transfer = config.transfer
    disk = NodeDisk.open(tier.path, store_id, node=members.node, durable=transfer.durable, direct_io=transfer.direct_io)
    if members.is_reporter:
        disk.mark_epoch(epoch)
    return disk


def place_on(
    disk: NodeDisk, tier: FastTier, members: Members, *, config: StoreConfig, claim: tuple[int, str], epoch: int
) -> FastPlace:
    """The fast tier of this process."""
    transfer = Transfer(disk.storage, config=config.transfer, retry=config.retry, rank=members.rank)
    return FastPlace(
        tier=tier,
        disk=disk,
        transfer=transfer,
        members=members,
        claim_number=claim[0],
        claim_sha256=claim[1],
        epoch=epoch,
    )
