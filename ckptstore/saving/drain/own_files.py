"""What one rank brings into the store of a fast checkpoint: its own files, from the disk of its node."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from ckptstore.errors import CheckpointDamaged, InvalidSource, SourceChanged
from ckptstore.fast.certificate import Certificate
from ckptstore.fast.place import FastPlace
from ckptstore.format.digest import to_hex
from ckptstore.format.manifest import Receipt
from ckptstore.runtime.beat import Beat
from ckptstore.storage.base import Storage
from ckptstore.transfer import Transfer
from ckptstore.transfer.paced import PacedSource, Pacer
from ckptstore.transfer.planned import PlannedFile
from ckptstore.transfer.sources import FileSource, Source

_GROUP_BYTES = 1 << 30
"""After so many bytes it is noted which files are there: what a store that goes away makes this rank send again."""


class OwnFiles:
    """The files of this rank in one fast checkpoint, over all tries to send them."""

    def __init__(self, place: FastPlace, certificate: Certificate) -> None:
        self._place = place
        self._attempt = certificate.attempt
        self._receipts = certificate.by_rank.get(place.members.rank, ())
        self._sent: set[str] = set()
        """Names of files that are in the store, with the digest of their receipts."""
        self.sent_bytes = 0

    @property
    def num_files(self) -> int:
        """How many there are."""
        return len(self._receipts)

    @property
    def size_bytes(self) -> int:
        """Of all of them."""
        return sum(receipt.size_bytes for receipt in self._receipts)

    @property
    def has_sent(self) -> bool:
        """Whether a file is in the store that need not be sent again."""
        return bool(self._sent)

    def send(self, storage: Storage, transfer: Transfer, *, pacer: Pacer | None, beat: Beat, check: Beat) -> None:
        """Send what the store has not, and compare its digests with the receipts. What `check` raises ends it.

        Raises CheckpointDamaged when the disk of the node does not have what this rank stored there, and what the
        storage raises; files that were sent are not sent again then.
        """
        if self._sent:
            start = len(self._attempt.prefix)
            there = {file.key[start:]: file.size_bytes for file in storage.list(self._attempt.prefix)}
            self._sent &= {item.name for item in self._receipts if there.get(item.name) == item.size_bytes}
            beat()

        def paced(source: Source) -> Source:
            return source if pacer is None else PacedSource(source, lambda size: pacer.wait(size, waiting))

        def waiting() -> None:
            check()
            beat()

        for group in _in_groups([receipt for receipt in self._receipts if receipt.name not in self._sent]):
            files = [PlannedFile(self._attempt.key(item.name), paced(self._source(item))) for item in group]
            try:
                stored = transfer.upload(files, beat=beat, check=check)
            except (SourceChanged, InvalidSource) as error:
                raise self._damaged(group[0], error.message, file=error.file) from error
            for receipt, found in zip(group, stored, strict=True):
                self.sent_bytes += found.size_bytes
                if receipt.crc32c is not None and found.crc32c != receipt.crc32c:
                    digests = f"its CRC32C is {to_hex(found.crc32c)}, its rank stored {to_hex(receipt.crc32c)}"
                    raise self._damaged(receipt, digests)
                self._sent.add(receipt.name)

    def _source(self, receipt: Receipt) -> FileSource:
        """Where this rank reads one of its files."""
        path = self._place.disk.storage.local_path(self._attempt.key(receipt.name))
        try:
            status = os.stat(path)
        except OSError as error:
            raise self._damaged(receipt, f"it cannot be read: {error.strerror}") from error
        if status.st_size != receipt.size_bytes:
            raise self._damaged(receipt, f"it has {status.st_size} bytes, its rank stored {receipt.size_bytes}")
        return FileSource.of(path, status)

    def _damaged(self, receipt: Receipt, what: str, *, file: str | None = None) -> CheckpointDamaged:
        return CheckpointDamaged(
            f"{receipt.name} is damaged on the disk of {self._place.members.node}: {what}",
            step=self._attempt.step,
            rank=receipt.rank,
            file=file or receipt.name,
            hint="This fast checkpoint does not come into the store. Look at the disk, the next one may fail too",
        )


def _in_groups(receipts: Sequence[Receipt]) -> Iterator[list[Receipt]]:
    group: list[Receipt] = []
    for receipt in receipts:
        group.append(receipt)
        if sum(item.size_bytes for item in group) >= _GROUP_BYTES:
            yield group
            group = []
    if group:
        yield group
