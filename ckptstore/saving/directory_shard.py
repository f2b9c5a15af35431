"""The shard of a directory checkpoint: one rank's files, under names that all ranks agree on."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from typing import Any

from ckptstore.events import SaveStarted, emit
from ckptstore.format.layout import Attempt
from ckptstore.format.manifest import Receipt
from ckptstore.format.naming import Naming, Offer, agree
from ckptstore.group import Beat
from ckptstore.saving.directories import Directory, sha256_of_files
from ckptstore.saving.request import Request
from ckptstore.saving.shard import Agreed, Contents
from ckptstore.storage.base import Disk, Storage
from ckptstore.transfer import Transfer
from ckptstore.transfer.planned import PlannedFile


class DirectoryShard:
    """See `ckptstore.saving.shard.Shard`."""

    def __init__(
        self,
        step: Any,
        find: Callable[[], Directory],
        *,
        rank: int,
        storage: Storage,
        transfer: Transfer,
        suffix: str,
        shared: Collection[str],
        link: bool,
        **asked: Any,
    ) -> None:
        """`find` looks what this rank's directory holds; nothing is looked at yet."""
        self.step = step
        self._rank = rank
        self._storage = storage
        self._transfer = transfer
        self._find = find
        self._asked = {"step": step, "suffix": suffix, "shared": sorted(shared), "link": link, **asked}
        self._found = Directory()
        self._agreement: Naming | None = None

    def describe(self) -> tuple[Request, bytes]:
        request = Request.of(kind="directory", **self._asked)
        found = self._found = self._find()
        digests = sha256_of_files(found, self._asked["shared"])
        size_bytes = 0 if self._asked["link"] else found.size_bytes
        offer = Offer(self._asked["suffix"], list(found.files), found.empty, digests, size_bytes)
        return request, json.dumps(offer.to_json()).encode()

    def agree(self, descriptions: Sequence[bytes]) -> Agreed:
        self._agreement = agree([Offer.from_json(json.loads(text)) for text in descriptions])
        return Agreed(json.dumps(self._agreement.to_json()).encode(), self._agreement.size_bytes)

    def store(self, attempt: Attempt, told: bytes, beat: Beat) -> bytes:
        agreement, rank = Naming.from_json(json.loads(told)), self._rank
        names = {
            name: stored for name in self._found.files if (stored := agreement.stored_name(name, rank)) is not None
        }
        receipts = self._link(attempt, names) if self._asked["link"] else []
        for receipt in receipts:
            del names[receipt.original_name or receipt.name]
        receipts += self._upload(attempt, names, beat)
        return json.dumps([receipt.to_json() for receipt in receipts]).encode()

    def join(self, attempt: Attempt, stored: Sequence[bytes], beat: Beat) -> Contents:
        assert self._agreement is not None  # the leader agreed before
        receipts = [Receipt.from_json(entry) for text in stored for entry in json.loads(text)]
        beat()
        return Contents(receipts, self._agreement.directories)

    def _link(self, attempt: Attempt, names: dict[str, str]) -> list[Receipt]:
        """Other names for the files of this rank, as far as the disk can; nothing of them is read."""
        storage = self._storage
        if not isinstance(storage, Disk):
            return []
        prefix = attempt.prefix
        receipts = [
            Receipt(stored, source.size_bytes, None, self._rank, name if name != stored else None)
            for name, stored in names.items()
            if storage.link((source := self._found.files[name]).path, prefix + stored)
        ]
        if isinstance(storage, Disk):
            storage.persist([prefix + receipt.name for receipt in receipts])
        return receipts

    def _upload(self, attempt: Attempt, names: dict[str, str], beat: Beat) -> list[Receipt]:
        prefix, rank = attempt.prefix, self._rank
        files = [PlannedFile(prefix + stored, self._found.files[name]) for name, stored in names.items()]
        size_bytes = sum(file.source.size_bytes for file in files)
        emit(
            SaveStarted(step=attempt.step, attempt=str(attempt), rank=rank, num_files=len(files), size_bytes=size_bytes)
        )
        done = self._transfer.upload(files, beat=beat)
        return [
            Receipt(stored, file.size_bytes, file.crc32c, rank, name if name != stored else None)
            for (name, stored), file in zip(names.items(), done, strict=True)
        ]
