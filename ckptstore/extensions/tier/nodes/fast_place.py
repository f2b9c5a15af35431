"""The fast tier of one process of a job that has claimed the store and whose ranks have met."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from ckptstore.errors import CheckpointDamaged, CkptstoreError, StorageError
from ckptstore.extensions.tier.candidates import CertificatePlace
from ckptstore.extensions.tier.certificate import CERTIFICATE_NAME, MAX_CERTIFICATE_BYTES, Certificate, held_by
from ckptstore.extensions.tier.nodes.members import Members
from ckptstore.extensions.tier.nodes.node_disk import NodeDisk
from ckptstore.extensions.tier.nodes.node_server import NodeClient, NodeServer
from ckptstore.extensions.tier.tier import FastTier
from ckptstore.format.layout import Attempt
from ckptstore.format.manifest import sha256_of
from ckptstore.runtime.fork import in_forked_child
from ckptstore.runtime.parallel import started
from ckptstore.transfer import Transfer

logger = logging.getLogger("ckptstore")


@dataclass(kw_only=True)
class FastPlace:
    """The fast tier as one process of a job sees it. Safe for threads."""

    tier: FastTier
    disk: NodeDisk
    transfer: Transfer
    """Moves bytes to the disk of this node."""
    members: Members
    claim_number: int
    claim_sha256: str
    """The SHA-256 of the record by which the job claimed the store: certificates name it."""
    epoch: int
    saved: list[str] = field(default_factory=list)
    """Reporter: the attempts on this node that are certified, on it or perhaps on another one; oldest first."""
    server: NodeServer | None = None
    """Reporter: the server of the files of this node. None with one node."""
    clients: Mapping[str, NodeClient] = field(default_factory=dict)
    """The clients of the other nodes, by name."""
    _in_use: Counter[str] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _deletion: threading.Thread | None = None

    def __post_init__(self) -> None:
        in_forked_child(self, FastPlace._after_fork)

    def _after_fork(self) -> None:
        self._lock, self._deletion = threading.Lock(), None
        self.saved = []  # the parent's to delete

    @property
    def in_use(self) -> frozenset[str]:
        """The attempts that this process saves, drains or loads now."""
        with self._lock:
            return frozenset(self._in_use)

    @contextmanager
    def using(self, attempt: str) -> Iterator[None]:
        """Keep this process from deleting an attempt while the context lasts."""
        self.hold(attempt)
        try:
            yield
        finally:
            self.release(attempt)

    def hold(self, attempt: str) -> None:
        """Keep this process from deleting an attempt, until `release`."""
        with self._lock:
            self._in_use[attempt] += 1

    def release(self, attempt: str) -> None:
        """Undo one `hold`."""
        with self._lock:
            self._in_use[attempt] -= 1
            self._in_use += Counter()  # drops the attempts that are not held any more

    def certificate(self, manifest_data: bytes, save_number: int) -> Certificate:
        """Return the certificate of a save of this job.

        Its files lie on the nodes of its ranks, and with two copies on their partners.
        """
        members = self.members
        nodes = {node: list(members.ranks_of(node)) for node in members.all_nodes}
        if self.tier.copies == 2:
            for node in members.all_nodes:
                nodes[members.partner_of(node)] += members.ranks_of(node)
        return Certificate(
            manifest_data=manifest_data,
            save_number=save_number,
            claim_number=self.claim_number,
            claim_sha256=self.claim_sha256,
            holders=held_by(nodes),
        )

    def certificate_of(self, *places: CertificatePlace) -> Certificate:
        """Read a certificate from one of these places, from this node if possible.

        Raises CheckpointDamaged when it is not the expected one, StorageError when no place has it.
        """
        failures: list[CkptstoreError] = []
        for at in sorted(places, key=lambda found: found.node != self.disk.node):
            try:
                return self._certificate_at(at)
            except (StorageError, CheckpointDamaged) as error:
                failures.append(error)
        raise failures[0]

    def _certificate_at(self, at: CertificatePlace) -> Certificate:
        attempt = Attempt.parse(at.attempt)
        if attempt is None:
            raise CheckpointDamaged(f"{at.node} told of {at.attempt[:80]!r}, which is no attempt")
        key = attempt.key(CERTIFICATE_NAME)
        if at.node == self.disk.node:
            data = self.disk.storage.read(key)
        else:
            block = bytearray(min(at.size_bytes, MAX_CERTIFICATE_BYTES))
            self.clients[at.node].read_into(attempt, CERTIFICATE_NAME, 0, [memoryview(block)])
            data = bytes(block)
        if sha256_of(data) != at.sha256:
            raise CheckpointDamaged(f"{key} on {at.node} has changed since it was looked at", step=attempt.step)
        return Certificate.decode(data, file=key)

    def partner(self) -> NodeClient:
        """Return the client of the node that has the second copies of this node's files."""
        return self.clients[self.members.partner_of(self.members.node)]

    def held_ranks(self) -> tuple[int, ...]:
        """Return the ranks whose files this node holds in a save of this job."""
        members = self.members
        ranks = list(members.ranks_of(members.node))
        if self.tier.copies == 2:
            ranks += [
                rank
                for node in members.all_nodes
                if members.partner_of(node) == members.node
                for rank in members.ranks_of(node)
            ]
        return tuple(sorted(set(ranks)))

    def delete_old(self) -> None:
        """Reporter: delete superseded attempts, and the remains of failed saves of this job, on a thread of its own.

        Call it after a save that ended well, when every rank of the node has left the saves before it and none has
        begun another one. Only the next save waits for the deletion, before it writes (`settle`). A failure is only
        logged: the next save tries again. It also tries again to delete an attempt that is being read now.
        """
        # It needs no look at the log: a later job marks its epoch on this disk before it looks, and no job of a lower
        # epoch deletes after that.
        self.settle()
        old = self._old()
        try:
            attempts = self.disk.attempts()  # now: the next save has not made its own yet
        except CkptstoreError as error:
            logger.warning("old fast checkpoints on %s could not be listed: %s", self.disk.node, error)
            return
        left = [one for one in attempts if str(one) in old or (one.epoch == self.epoch and str(one) not in self.saved)]
        if left or old:
            delete = partial(self._delete, left, old)
            self._deletion = started(delete, name="ckptstore-fast-delete")
            if self._deletion is None:
                delete()

    def _old(self) -> frozenset[str]:
        return frozenset(self.saved[: -self.tier.keep]) - self.in_use

    def settle(self) -> None:
        """Wait for the deletion by this process, if one runs."""
        if self._deletion is not None:
            self._deletion.join()
            self._deletion = None

    def _delete(self, attempts: Sequence[Attempt], old: Collection[str]) -> None:
        try:
            gone = set(old)
            for attempt in attempts:
                if str(attempt) in self.in_use or not self.disk.delete_as(self.epoch, attempt):
                    gone.discard(str(attempt))
        except CkptstoreError as error:
            logger.warning("old fast checkpoints on %s could not be deleted: %s", self.disk.node, error)
        else:
            self.saved = [name for name in self.saved if name not in gone]

    def close(self) -> None:
        """Delete what a drain or a load kept from the deletion after the last save; give threads, connections and
        buffers back.

        The remains of failed saves stay: another rank may still certify one of them.
        """
        self.settle()
        if old := self._old():
            self._delete([Attempt.of(name) for name in old], old)
        for client in self.clients.values():
            client.close()
        if self.server is not None:
            self.server.close()
        self.transfer.close()
        self.disk.storage.close()
