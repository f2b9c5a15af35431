"""A fast checkpoint on several nodes as one storage, which reads from the own disk, another holder, or the store."""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TypeVar

from ckptstore.errors import CheckpointDamaged, CkptstoreError, FileMissing, StorageError
from ckptstore.extensions.tier.certificate import CERTIFICATE_NAME, Certificate
from ckptstore.extensions.tier.nodes.node_disk import NodeDisk
from ckptstore.extensions.tier.nodes.node_server import NodeClient
from ckptstore.format.manifest import Receipt
from ckptstore.storage.base import Storage, StoredFile

logger = logging.getLogger("ckptstore")

T = TypeVar("T")


class HeldStorage(Storage):
    """The files of one fast checkpoint, read-only. Safe for threads.

    Once a range or a file is doubted, because its digest was wrong, it is read from the next place that has the file.
    """

    def __init__(
        self,
        disk: NodeDisk,
        certificate: Certificate,
        holders: Mapping[int, Sequence[str]],
        clients: Mapping[str, NodeClient],
        *,
        store: Storage | None,
        later: Callable[[], Storage | None] | None = None,
    ) -> None:
        """`holders` are the nodes by rank, `clients` reach the other nodes by name.

        `store` has the same files under the same keys, if the checkpoint is durable. `later` is called for it when no
        node can supply a file: the checkpoint may have become durable meanwhile.
        """
        self._disk, self._certificate, self._clients, self._store = disk, certificate, clients, store
        self._holders, self._later = holders, later
        self._prefix = certificate.attempt.prefix
        self._doubts: Counter[tuple[str, int, int | None]] = Counter()
        self._told: set[str] = set()
        self._lock = threading.Lock()

    @property
    def uri(self) -> str:
        """The URI of the part on this node."""
        return self._disk.storage.uri

    def _places(self, receipt: Receipt) -> list[str]:
        """Return the places of a file, nearest first; "" is the store."""
        nodes = [
            node for node in self._holders.get(receipt.rank, ()) if node == self._disk.node or node in self._clients
        ]
        nodes.sort(key=lambda node: node != self._disk.node)
        if not nodes:
            self._ask_store()
        return [*nodes, *([""] if self._store is not None else [])]

    def _ask_store(self) -> bool:
        """Return True if the store has the checkpoint now, and that was not known."""
        if self._store is not None or self._later is None:
            return False
        self._store = self._later()
        return self._store is not None

    def held(self) -> AbstractContextManager[None]:
        """Keep every process of this node from deleting the checkpoint on its disk while the context lasts."""
        return self._disk.reading(self._certificate.attempt)

    def is_gone(self) -> bool:
        """Return True if its certificate on this node was deleted, and the store is not known to have it.

        Always False without `later`: then it was not found by that certificate alone.
        """
        certificate = self._disk.storage.local_path(self._certificate.attempt.key(CERTIFICATE_NAME))
        return self._later is not None and self._store is None and not os.path.lexists(certificate)

    def receipts_here(self) -> tuple[Receipt, ...]:
        """Return the receipts of the files that some place has, or that this node should have."""
        own = self._certificate.holders.get(self._disk.node, ())
        files = self._certificate.manifest.files
        return tuple(receipt for receipt in files if receipt.rank in own or self._places(receipt))

    def unreachable(self, receipt: Receipt) -> StorageError:
        """Return the error of a file that no place has."""
        nodes = sorted(node for node, ranks in self._certificate.holders.items() if receipt.rank in ranks)
        return StorageError(
            f"{receipt.name} of rank {receipt.rank} lies on {' and '.join(nodes)}, which this process does not reach",
            step=self._certificate.manifest.step,
            rank=receipt.rank,
            file=receipt.name,
            hint="Read it there, resume with all nodes, or wait until the checkpoint is in the store",
        )

    def read_into(self, key: str, offset: int, views: Sequence[memoryview], *, version: str | None = None) -> None:
        """See `Storage.read_into`. The version is ignored."""
        receipt = self._receipt(key)
        with self._lock:
            first = self._doubts[key, offset, sum(map(len, views))] + self._doubts[key, 0, None]
        if first:
            self._ask_store()
        places = self._places(receipt)
        if not places:
            raise self.unreachable(receipt)
        self._from_any(key, places, first, lambda place: self._read(place, receipt, key, offset, views))

    def doubt(self, key: str, offset: int = 0, size_bytes: int | None = None) -> None:
        """See `Doubts`: from now on this is read from the next place."""
        with self._lock:
            self._doubts[key, offset, size_bytes] += 1

    def _read(self, place: str, receipt: Receipt, key: str, offset: int, views: Sequence[memoryview]) -> None:
        if place == self._disk.node:
            self._disk.storage.read_into(key, offset, views)
        elif place:
            self._clients[place].read_into(self._certificate.attempt, receipt.name, offset, views)
        elif self._store is None:
            raise self.unreachable(receipt)
        else:
            self._store.read_into(key, offset, views)

    def _from_any(self, key: str, places: Sequence[str], first: int, action: Callable[[str], T]) -> T:
        """Return the result of `action` at the first place where it succeeds, beginning at `places[first]`, cyclic."""
        failures: list[CkptstoreError] = []
        for number in range(len(places)):
            place = places[(first + number) % len(places)]
            try:
                found = action(place)
            except (StorageError, CheckpointDamaged) as error:
                failures.append(error)
                continue
            if place != places[0]:
                self._tell(key, place, failures)
            return found
        if self._ask_store():
            found = action("")
            self._tell(key, "", failures)
            return found
        raise failures[0]

    def _tell(self, key: str, place: str, failures: Sequence[CkptstoreError]) -> None:
        with self._lock:
            if key in self._told:
                return
            self._told.add(key)
        why = failures[0].message if failures else "its digest was wrong"
        logger.warning("%s is read from %s, for where it was read first: %s", key, place or "the store", why)

    def read(self, key: str) -> bytes:
        data = bytearray(self._receipt(key).size_bytes)
        self.read_into(key, 0, [memoryview(data)])
        return bytes(data)

    def stat(self, key: str) -> StoredFile:
        """See `Storage.stat`. The time is 0.0: it is not known."""
        return StoredFile(key, self._receipt(key).size_bytes, 0.0)

    def list(self, prefix: str) -> Iterator[StoredFile]:
        """See `Storage.list`. It lists the files that some place has."""
        for receipt in self._certificate.manifest.files:
            key = self._prefix + receipt.name
            if key.startswith(prefix) and self._places(receipt):
                yield StoredFile(key, receipt.size_bytes, 0.0)

    def write(self, key: str, views: Sequence[memoryview]) -> None:
        """Raise StorageError: the storage is read-only."""
        raise StorageError(f"{key} is a file of a fast checkpoint, which is never written again", file=key)

    def delete(self, keys: Sequence[str]) -> None:
        """Raise StorageError: the storage is read-only."""
        raise StorageError("Files of a fast checkpoint are deleted with all of it")

    def close(self) -> None:
        """Do nothing: the owners of the disk, the clients and the store close them."""

    def _receipt(self, key: str) -> Receipt:
        receipt = self._certificate.manifest.by_name.get(key.removeprefix(self._prefix))
        if receipt is None or not key.startswith(self._prefix):
            raise FileMissing(f"The checkpoint has no file {key}", file=key)
        return receipt
