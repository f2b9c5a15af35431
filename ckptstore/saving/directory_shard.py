"""The shard of a directory checkpoint: one rank's files, under names that all ranks agree on."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptstore.boundary import is_path
from ckptstore.errors import InvalidInput, InvalidSource
from ckptstore.events import SaveStarted, emit
from ckptstore.format.layout import Attempt
from ckptstore.format.manifest import Receipt
from ckptstore.format.naming import Naming, Offer, agree
from ckptstore.job import Job
from ckptstore.runtime.beat import beat
from ckptstore.saving.directories import Directory, scan, sha256_of_files
from ckptstore.saving.request import Request, is_new
from ckptstore.saving.shard import Contents, Decision
from ckptstore.saving.transaction import checked
from ckptstore.storage.base import Disk, Storage
from ckptstore.transfer import Transfer
from ckptstore.transfer.moves import PlannedFile, Upload

logger = logging.getLogger("ckptstore")


@dataclass(frozen=True, slots=True)
class DirectoryPlan:
    """See `ckptstore.saving.shard.Plan`."""

    found: Directory
    naming: Naming
    rank: int
    storage: Storage
    upload: Upload
    link: bool

    def store(self, attempt: Attempt) -> list[dict[str, Any]]:
        names = self.naming.stored(self.found.files, self.rank)
        receipts = self._link_files(attempt, names) if self.link else []
        for receipt in receipts:
            del names[receipt.original_name or receipt.name]
        receipts += self._send(attempt, names)
        return [receipt.to_json() for receipt in receipts]

    def join(self, attempt: Attempt, stored: Sequence[Any]) -> Contents:
        receipts = [Receipt.from_json(entry) for entries in stored for entry in entries]
        beat()
        _tell_surprises(self.storage.uri, attempt.step, receipts)
        return Contents(receipts, self.naming.directories)

    def _link_files(self, attempt: Attempt, names: Mapping[str, str]) -> list[Receipt]:
        """Hard-link this rank's files as far as the disk allows, and return their receipts. No file is read."""
        storage, found = self.storage, self.found.files
        if not isinstance(storage, Disk):
            return []
        prefix = attempt.prefix
        linked = storage.link([(found[name].path, prefix + stored) for name, stored in names.items()])
        receipts = [
            Receipt(stored, found[name].size_bytes, None, self.rank, name if name != stored else None)
            for (name, stored), is_linked in zip(names.items(), linked, strict=True)
            if is_linked
        ]
        storage.persist([prefix + receipt.name for receipt in receipts])
        return receipts

    def _send(self, attempt: Attempt, names: Mapping[str, str]) -> list[Receipt]:
        prefix, rank, found = attempt.prefix, self.rank, self.found.files
        files = [PlannedFile(prefix + stored, found[name]) for name, stored in names.items()]
        size_bytes = sum(file.source.size_bytes for file in files)
        emit(
            SaveStarted(step=attempt.step, attempt=str(attempt), rank=rank, num_files=len(files), size_bytes=size_bytes)
        )
        done = self.upload(files)
        return [
            Receipt(stored, file.size_bytes, file.digest, rank, name if name != stored else None)
            for (name, stored), file in zip(names.items(), done, strict=True)
        ]


class DirectoryShard:
    """See `ckptstore.saving.shard.Shard`."""

    def __init__(
        self,
        find: Callable[[], Directory],
        *,
        rank: int,
        storage: Storage,
        transfer: Transfer,
        suffix: Any,
        shared: Collection[str],
        link: bool,
    ) -> None:
        """`find` lists this rank's directory; `describe` calls it."""
        self._rank = rank
        self._storage = storage
        self._upload: Upload = transfer.upload
        self._find = find
        self._suffix, self._shared, self._link = suffix, shared, link
        self._found = Directory()
        self._naming = Naming("auto", frozenset(), {}, (), 0)

    def move(self, storage: Storage, upload: Upload) -> None:
        """Use another storage from now on."""
        self._storage, self._upload = storage, upload

    def describe(self) -> list[Any]:
        if self._link and not isinstance(self._storage, Disk):
            raise InvalidInput(f"link=True makes hard links, and {self._storage.uri} is no disk", hint="Leave link out")
        if not _are_names(self._shared):
            example = self._shared if isinstance(self._shared, str) else "tokenizer.json"
            raise InvalidInput(f"shared is {self._shared!r}, it is a list of names", hint=f"As in [{example!r}]")
        found = self._found = self._find()
        if not isinstance(found, Directory):  # what a function made that was passed for a path
            raise InvalidInput(f"path is {self._find!r}, it is a path, or None")
        digests = sha256_of_files(found, sorted(self._shared))
        size_bytes = 0 if self._link else found.size_bytes
        return Offer(self._suffix, list(found.files), found.empty, digests, size_bytes).to_json()

    def decide(self, descriptions: Sequence[Any]) -> Decision:
        offers = [Offer.from_json(offer) for offer in descriptions]
        naming = agree(offers)
        for name in sorted(set(self._shared).difference(*(offer.shared for offer in offers))):
            if is_new(self._storage.uri, name, "shared"):
                logger.warning("shared=[%r]: no rank has a file of that name", name)
        return Decision(naming.to_json(), naming.size_bytes)

    def hear(self, told: Any) -> None:
        self._naming = Naming.from_json(told)

    def plan(self) -> DirectoryPlan:
        return DirectoryPlan(self._found, self._naming, self._rank, self._storage, self._upload, self._link)


def directory_of(
    job: Job,
    step: Any,
    path: str | os.PathLike[str] | Callable[[], Directory] | None,
    *,
    metrics: Mapping[str, Any] | None = None,
    metadata: Mapping[str, Any] | None = None,
    exists: str = "replace",
    suffix: Any = "auto",
    shared: Any = (),
    link: bool = False,
) -> tuple[Request, DirectoryShard]:
    """Return the checked request of a `save_directory`, and the shard of this rank. Collective if the request is bad,
    so that its error is raised on all ranks. In place of a path there may be a function that lists this rank's files.
    """
    rank, storage, transfer = job.group.rank, job.storage, job.transfer
    suffix = suffix if isinstance(suffix, str) else repr(suffix)  # the wrong ones are refused later, on all ranks
    request = checked(
        job.group,
        kind="directory",
        step=step,
        metrics=metrics,
        metadata=metadata,
        exists=exists,
        retention=job.retention,
        suffix=suffix,
        shared=sorted(shared) if _are_names(shared) else repr(shared),
        link=link,
    )
    find = path if callable(path) else lambda: _listed(path, storage)
    shard = DirectoryShard(find, rank=rank, storage=storage, transfer=transfer, suffix=suffix, shared=shared, link=link)
    return request, shard


def _are_names(shared: Any) -> bool:
    return (
        isinstance(shared, Collection) and not isinstance(shared, str) and all(isinstance(name, str) for name in shared)
    )


def _listed(path: str | os.PathLike[str] | None, storage: Storage) -> Directory:
    """List a rank's directory. Raises InvalidSource if the store lies in it: each save would store all those before."""
    if path is not None and not is_path(path):
        raise InvalidInput(f"path is {path!r}, it is a path, or None")
    if path is not None and isinstance(storage, Disk):
        store = Path(os.path.realpath(storage.local_path("")))
        if store.is_relative_to(os.path.realpath(path)):
            raise InvalidSource(
                f"The store {store} lies in the directory {os.fspath(path)} that it is to store",
                file=str(store),
                hint="Give the store a directory elsewhere, or save a directory below",
            )
    return scan(path)


def _tell_surprises(store: str, step: int, receipts: Sequence[Receipt]) -> None:
    """Log what a caller may not expect: no file at all, and names with a rank in them."""
    if not receipts:
        logger.warning("step %d has no files: the directory is empty on all ranks", step)
    renamed: dict[str, list[Receipt]] = {}
    for receipt in receipts:
        if receipt.original_name is not None:
            renamed.setdefault(receipt.original_name, []).append(receipt)
    if not renamed:
        return
    same = sorted(name for name, copies in renamed.items() if len(copies) > 1 and _is_one_content(copies))
    name = min(same or renamed)
    if not is_new(store, name, "same" if same else "renamed"):
        return
    what = f"{name} is {', '.join(receipt.name for receipt in renamed[name][:2])}"
    more = f", and so for {len(same or renamed) - 1} other names" if len(same or renamed) > 1 else ""
    if same:
        hint = f"the same bytes on {len(renamed[name])} ranks: give shared=[{name!r}], and it is stored once, as {name}"
        logger.warning("step %d: %s%s; %s", step, what, more, hint)
    else:
        logger.info("step %d: ranks bring files of the same name: %s%s", step, what, more)


def _is_one_content(copies: Sequence[Receipt]) -> bool:
    contents = {(copy.size_bytes, copy.digest) for copy in copies}
    return len(contents) == 1 and copies[0].digest is not None
