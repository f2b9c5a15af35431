"""The files of one rank in a fast checkpoint, which it sends from the disk of its node to the store."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from ckptstore.errors import CheckpointDamaged, CkptstoreError, InvalidSource, SourceChanged
from ckptstore.extensions.tier.certificate import Certificate
from ckptstore.extensions.tier.drain.paced import PacedSource, Pacer
from ckptstore.extensions.tier.nodes.fast_place import FastPlace
from ckptstore.extensions.tier.nodes.node_server import NodeClient
from ckptstore.format.layout import Attempt
from ckptstore.format.manifest import Receipt
from ckptstore.runtime.beat import Beat, beat, current_beat
from ckptstore.storage.base import Storage
from ckptstore.transfer import Stored, Transfer
from ckptstore.transfer.moves import PlannedFile
from ckptstore.transfer.sources import FileSource, Read, Source

logger = logging.getLogger("ckptstore")

_GROUP_BYTES = 1 << 30
"""Files are uploaded in groups of about so many bytes: after an error of the store only one group is sent again."""

_UNREADABLE = SourceChanged, InvalidSource
"""Errors of a source, never of the store."""
_Upload = Callable[[Sequence[Receipt], Sequence[Source]], list[Stored]]


class OwnFiles:
    """The files of this rank in one fast checkpoint, over all tries to send them."""

    def __init__(self, place: FastPlace, certificate: Certificate) -> None:
        self._place = place
        self._attempt = certificate.attempt
        self._receipts = certificate.by_rank.get(place.members.rank, ())
        self.num_files, self.size_bytes = len(self._receipts), sum(receipt.size_bytes for receipt in self._receipts)
        self._sent: set[str] = set()
        """The names of the files that are in the store, with the digests of their receipts."""
        self.sent_bytes = 0

    @property
    def has_sent(self) -> bool:
        """True if a file is in the store, and need not be sent again."""
        return bool(self._sent)

    def send(self, storage: Storage, transfer: Transfer, *, pacer: Pacer | None, check: Beat) -> None:
        """Send the files that the store lacks, and compare their digests with the receipts.

        A file that is damaged on the disk of this node is sent from the partner's copy. Raises CheckpointDamaged when
        that does not help either, the errors of the storage, and those of `check`, which is called now and then. The
        next call does not send again the files that were sent.
        """
        if self._sent:
            start = len(self._attempt.prefix)
            there = {file.key[start:]: file.size_bytes for file in storage.list(self._attempt.prefix)}
            self._sent &= {item.name for item in self._receipts if there.get(item.name) == item.size_bytes}
            beat()

        sign = current_beat()  # threads of the transfer wait too

        def waiting() -> None:
            check()
            sign()

        def upload(receipts: Sequence[Receipt], sources: Sequence[Source]) -> list[Stored]:
            paced = sources
            if pacer is not None:
                paced = [PacedSource(source, lambda size: pacer.wait(size, waiting)) for source in sources]
            files = [
                PlannedFile(self._attempt.key(receipt.name), source, receipt.digest and receipt.digest.algorithm)
                for receipt, source in zip(receipts, paced, strict=True)
            ]
            return transfer.upload(files, check=check)

        for group in _in_groups([receipt for receipt in self._receipts if receipt.name not in self._sent]):
            self._send_group(group, upload)

    def _send_group(self, group: Sequence[Receipt], upload: _Upload) -> None:
        damaged: dict[str, str] = {}
        try:
            self._compare(group, upload(group, [self._source(receipt) for receipt in group]), damaged)
        except _UNREADABLE as error:
            if len(group) > 1:  # which one it is shows when each is sent on its own
                for receipt in group:
                    self._send_group([receipt], upload)
                return
            damaged[group[0].name] = error.message
        for receipt in group:
            if (what := damaged.pop(receipt.name, None)) is not None:
                self._send_copy(receipt, what, upload)

    def _send_copy(self, receipt: Receipt, what: str, upload: _Upload) -> None:
        """Send the partner's copy of a file that is damaged or missing on the disk of this node."""
        place, damaged = self._place, dict[str, str]()
        if place.tier.copies == 2:
            partner = place.partner()
            try:
                source = _OnPartner(partner, self._attempt, receipt.name, receipt.size_bytes)
                self._compare([receipt], upload([receipt], [source]), damaged)
            except _UNREADABLE as error:
                damaged[receipt.name] = error.message
            if not damaged:
                told = "step %d: %s was sent from %s, for it is damaged on %s: %s"
                logger.warning(told, self._attempt.step, receipt.name, partner.node, place.members.node, what)
                return
            what = f"{what}; and on {partner.node}: {damaged[receipt.name]}"
        raise CheckpointDamaged(
            f"{receipt.name} is damaged on the disk of {place.members.node}: {what}",
            step=self._attempt.step,
            rank=receipt.rank,
            file=receipt.name,
            hint="This fast checkpoint does not come into the store. Look at the disk, the next one may fail too",
        )

    def _compare(self, group: Sequence[Receipt], stored: Sequence[Stored], damaged: dict[str, str]) -> None:
        for receipt, found in zip(group, stored, strict=True):
            self.sent_bytes += found.size_bytes
            if found.digest == receipt.digest:
                self._sent.add(receipt.name)
            else:
                assert receipt.digest is not None  # a certificate has all digests
                damaged[receipt.name] = f"its {found.digest.title} is {found.digest.hex}, and was {receipt.digest.hex}"

    def _source(self, receipt: Receipt) -> FileSource:
        """Return the file on the disk of this node. Raises InvalidSource if it is not there with its size."""
        path = self._place.disk.storage.local_path(self._attempt.key(receipt.name))
        try:
            status = os.stat(path)
        except OSError as error:
            raise InvalidSource(f"it cannot be read: {error.strerror}", file=str(path)) from error
        if status.st_size != receipt.size_bytes:
            raise InvalidSource(f"it has {status.st_size} bytes, and had {receipt.size_bytes}", file=str(path))
        return FileSource.of(path, status)


@dataclass(frozen=True, slots=True)
class _OnPartner:
    """The copy of a file on the partner node, as a source."""

    client: NodeClient
    attempt: Attempt
    name: str
    size_bytes: int
    payloads: Sequence[tuple[int, int]] = ()
    in_memory: bool = False

    @contextmanager
    def open(self) -> Iterator[Read]:
        """See `Source.open`. An error of the node becomes InvalidSource: it is no error of the store."""
        yield self._read

    def _read(self, offset: int, size_bytes: int, scratch: memoryview) -> Sequence[memoryview]:
        view = scratch[:size_bytes]
        try:
            self.client.read_into(self.attempt, self.name, offset, [view])
        except CkptstoreError as error:
            raise InvalidSource(error.message, file=self.name) from error
        return [view]


def _in_groups(receipts: Sequence[Receipt]) -> Iterator[list[Receipt]]:
    group: list[Receipt] = []
    for receipt in receipts:
        group.append(receipt)
        if sum(item.size_bytes for item in group) >= _GROUP_BYTES:
            yield group
            group = []
    if group:
        yield group
