"""View the fast checkpoints of one store on the disk of this node, judged by its log. Nothing is changed."""

from __future__ import annotations

import os
from dataclasses import dataclass

from ckptstore.extensions.tier.certificate import Certificate
from ckptstore.extensions.tier.upkeep.node_clear import Judged, judge, read_log
from ckptstore.extensions.tier.upkeep.node_inventory import HeldAttempt, held_store
from ckptstore.format.record import Record
from ckptstore.format.timings import clean_node
from ckptstore.group.base import this_node
from ckptstore.log.reader import LogReader
from ckptstore.storage.base import Storage


@dataclass(frozen=True, slots=True)
class NodeFast:
    """One attempt on this node, and its standing in its store."""

    found: HeldAttempt
    judged: Judged

    @property
    def certificate(self) -> Certificate | None:
        """The certificate; None if there is none that can be read."""
        return self.found.certificate

    @property
    def is_usable(self) -> bool:
        """True if it is certified and whole on this node, and a job may resume from it. Digests are not compared."""
        may_be_used = self.judged.standing in ("only-here", "durable", "superseded")
        return self.certificate is not None and not self.found.missing and may_be_used

    @property
    def fault(self) -> str:
        """The fault of its files, "" if there is none."""
        lost = self.found.missing
        return self.found.fault or (f"{lost[0]} is not there with its size" if lost else "")


@dataclass(frozen=True, slots=True)
class FastOnNode:
    """The fast checkpoints of one store on this node."""

    fast: tuple[NodeFast, ...] = ()
    """The attempts in the order of the saves; those without a certificate come first in their epoch."""
    fault: str = ""
    """The reason why the directory cannot be listed, "" if it can."""

    @property
    def newest(self) -> Certificate | None:
        """The certificate of the newest one that a job could resume from; None if there is none."""
        return next((one.certificate for one in reversed(self.fast) if one.is_usable), None)

    @property
    def not_durable_since(self) -> float | None:
        """The time of the oldest save that is newer than all of the store, by the clock of its leader.

        None if there is none.
        """
        waiting = [one.certificate for one in self.fast if one.judged.standing == "only-here"]
        return min((one.manifest.created_at for one in waiting if one is not None), default=None)


def view_node(
    directory: str | os.PathLike[str], store_id: str, log: LogReader, storage: Storage, *, newest: Record | None
) -> FastOnNode:
    """Return the fast checkpoints below a directory of this node. `newest` is the newest record of the log.

    Raises InvalidInput when the directory is not private to this user, StorageError, CheckpointDamaged when the log
    cannot be read.
    """
    here = held_store(directory, store_id, node=clean_node(this_node()))
    if here is None:
        return FastOnNode()
    view = read_log(log, storage, store_id, here.attempts, newest=newest)
    fast = sorted((NodeFast(each, judge(each, view)) for each in here.attempts), key=_order)
    return FastOnNode(tuple(fast), here.fault)


def _order(one: NodeFast) -> tuple[int, int]:
    return one.found.attempt.epoch, one.certificate.save_number if one.certificate else 0
