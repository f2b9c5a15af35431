"""Fast checkpoints for one process on its own: the attempts on the disk of its node, judged by the log.

No store is claimed, no file is changed, and no rank is waited for.

The certificates are those on this node. Files are read from its disk, from the other nodes of the job where this
process belongs to one that has opened its fast tier, and from the store once the checkpoint is durable.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator, Mapping

from ckptstore.errors import StorageError
from ckptstore.events import CheckpointSkipped, emit
from ckptstore.extensions.tier.certificate import Certificate
from ckptstore.extensions.tier.fast_files import FastFiles, held_files_of
from ckptstore.extensions.tier.nodes.fast_place import FastPlace
from ckptstore.extensions.tier.nodes.held_storage import HeldStorage
from ckptstore.extensions.tier.nodes.node_disk import NodeDisk
from ckptstore.extensions.tier.nodes.node_server import NodeClient
from ckptstore.extensions.tier.tier import FastTier
from ckptstore.extensions.tier.upkeep.node_clear import judge, read_log
from ckptstore.extensions.tier.upkeep.node_inventory import HeldAttempt, held_store
from ckptstore.format.timings import clean_node
from ckptstore.group.base import this_node
from ckptstore.job import Job
from ckptstore.loading.newest import Near
from ckptstore.log.identity import read_identity
from ckptstore.storage.base import Storage
from ckptstore.transfer import Transfer

logger = logging.getLogger("ckptstore")


class NearNode:
    """The disk of this node, looked at again and again for one job."""

    def __init__(self, job: Job, tier: FastTier) -> None:
        self._job, self._tier = job, tier
        self._transfers: weakref.WeakSet[Transfer] = weakref.WeakSet()
        job.at_close(self._close)

    def _close(self) -> None:
        for transfer in list(self._transfers):
            transfer.close()

    def look(self, place: FastPlace | None) -> list[Near]:
        """Return the checkpoints that can be used, oldest first.

        A `CheckpointSkipped` event names each of the rest, except void ones.

        `place` is the fast tier of this process, if its ranks have met for it. Raises InvalidInput when the directory
        is not private to this user; StorageError when the log or the directory cannot be read.
        """
        job, tier, clients = self._job, self._tier, place.clients if place else {}
        node = place.disk.node if place else clean_node(tier.node or this_node())
        store_id = read_identity(job.storage)
        here = held_store(tier.path, store_id, node=node) if store_id else None
        if here is None or store_id is None:
            return []
        if here.fault:
            raise StorageError(f"The fast checkpoints on {node} cannot be listed: {here.fault}")
        view = read_log(job.log, job.storage, store_id, here.attempts, newest=job.log.checked_newest())
        found = []
        for each in here.attempts:
            judged = judge(each, view)
            certificate, name = each.certificate, str(each.attempt)
            if judged.standing == "void":
                logger.info("the fast checkpoint %s on %s is not used: %s", name, node, judged.reason)
                continue
            lost = ", ".join(_lost(each, clients)[:3])
            fault = judged.reason if judged.standing == "foreign" else each.fault
            if why := fault or (f"not here with its size: {lost}" if lost else ""):
                number = None if judged.record is None else judged.record.number
                emit(CheckpointSkipped(step=each.attempt.step, number=number, reason=f"{name} on {node}: {why}"))
            elif certificate is not None:
                found.append(
                    Near(
                        order=certificate.order,
                        attempt=name,
                        is_durable=judged.standing == "durable",
                        is_superseded=judged.standing == "superseded",
                        files=self._files(here.disk, certificate, each, place),
                    )
                )
        return sorted(found, key=lambda near: near.order)

    def _files(
        self, disk: NodeDisk, certificate: Certificate, found: HeldAttempt, place: FastPlace | None
    ) -> FastFiles:
        job, clients = self._job, place.clients if place else {}
        holders = {
            rank: (*([disk.node] if rank in found.ranks else []), *_others(certificate, rank, clients))
            for rank in certificate.by_rank
        }

        def later() -> Storage | None:
            return job.storage if job.log.commit_of(certificate.attempt) else None

        storage = HeldStorage(disk, certificate, holders, clients, store=None, later=later)
        files = held_files_of(job, place, certificate, storage)
        self._transfers.add(files.transfer)
        return files


def _others(certificate: Certificate, rank: int, clients: Mapping[str, NodeClient]) -> Iterator[str]:
    """Yield the other nodes of the job that should hold the files of a rank."""
    return (node for node, ranks in certificate.holders.items() if rank in ranks and node in clients)


def _lost(found: HeldAttempt, clients: Mapping[str, NodeClient]) -> list[str]:
    """Return the files that this node should have, and that it and all nodes that can be reached lack."""
    certificate = found.certificate
    if certificate is None:
        return []
    ranks = {receipt.name: receipt.rank for receipt in certificate.manifest.files}
    return [name for name in found.missing if not any(_others(certificate, ranks[name], clients))]
