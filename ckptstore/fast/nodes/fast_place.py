"""What one process of a job has of the fast tier, once its job has claimed the store and its ranks have met."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from ckptstore.errors import CheckpointDamaged, CkptstoreError, StorageError
from ckptstore.fast.candidates import CertificatePlace
from ckptstore.fast.certificate import CERTIFICATE_NAME, MAX_CERTIFICATE_BYTES, Certificate, held_by
from ckptstore.fast.nodes.members import Members
from ckptstore.fast.nodes.node_disk import NodeDisk
from ckptstore.fast.nodes.node_server import NodeClient, NodeServer
from ckptstore.fast.tier import FastTier
from ckptstore.format.layout import Attempt
from ckptstore.format.manifest import sha256_of
from ckptstore.runtime.fork import in_forked_child
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
    """Of the record by which the job claimed the store: certificates name it."""
    epoch: int
    saved: list[str] = field(default_factory=list)
    """Reporter: the attempts on this node that are certified, here or perhaps on another node; the oldest first."""
    server: NodeServer | None = None
    """Reporter: what serves the files of this node to the others. None with one node."""
    clients: Mapping[str, NodeClient] = field(default_factory=dict)
    """What reaches the other nodes, by name."""
    _in_use: Counter[str] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _deletion: threading.Thread | None = None

    def __post_init__(self) -> None:
        in_forked_child(self, FastPlace._after_fork)

    def _after_fork(self) -> None:
        self._lock, self._deletion = threading.Lock(), None

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
            self._in_use += Counter()  # what is not held any more is left out

    def certificate(self, manifest_data: bytes, save_number: int) -> Certificate:
        """That of a save of this job whose files lie where its ranks, and with two copies their partners, are."""
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
        """A certificate that lies in these places, from this node if it can be.

        Raises CheckpointDamaged where it is not the one that was meant, StorageError where no place has it.
        """
        failure: CkptstoreError | None = None
        for at in sorted(places, key=lambda found: found.node != self.disk.node):
            try:
                return self._certificate_at(at)
            except (StorageError, CheckpointDamaged) as error:
                failure = failure or error
        assert failure is not None  # there is a place
        raise failure

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
        """What reaches the node that has the second copies of this one's files."""
        return self.clients[self.members.partner_of(self.members.node)]

    def held_ranks(self) -> tuple[int, ...]:
        """The ranks whose files this node holds of a save of this job."""
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

    def has_saved(self, attempt: Attempt) -> None:
        """Reporter: an attempt is certified, or perhaps is."""
        self.saved.append(str(attempt))

    def delete_old(self) -> None:
        """Reporter: the last save has ended well. Every rank of the node has left the saves before it, and no rank has
        begun another one.

        What is superseded goes, and so does what failed saves of this job have left. Nobody waits for the deletion but
        the next save before it writes (`settle`). It needs no look at the log: a later job marks its epoch on this disk
        before it looks, and no job of a lower one deletes after that. A failure is only logged: the next save tries
        again. So it does with one that somebody reads.
        """
        self.settle()
        old = {name for name in self.saved[: -self.tier.keep] if name not in self.in_use}
        try:
            attempts = self.disk.attempts()  # now: that of the next save is not there yet
        except CkptstoreError as error:
            logger.warning("old fast checkpoints on %s could not be listed: %s", self.disk.node, error)
            return
        left = [one for one in attempts if str(one) in old or (one.epoch == self.epoch and str(one) not in self.saved)]
        if left or old:
            self._deletion = threading.Thread(
                target=self._delete, args=(left, old), name="ckptstore-fast-delete", daemon=True
            )
            self._deletion.start()

    def settle(self) -> None:
        """Wait until nothing is being deleted by this process."""
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
        """Give threads, connections and buffers back."""
        self.settle()
        for client in self.clients.values():
            client.close()
        if self.server is not None:
            self.server.close()
        self.transfer.close()
        self.disk.storage.close()
