"""The files of one checkpoint: in a directory on its own, or committed in a store.

Files on the disks of nodes are a third kind (`ckptstore.extensions.tier.fast_files`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from ckptstore.config import StoreConfig
from ckptstore.errors import CheckpointDamaged, CheckpointGone, FileMissing, StorageError
from ckptstore.format.layout import CHECKPOINT_PREFIX, DCP_METADATA_NAME, MANIFEST_NAME, USER_METADATA_NAME
from ckptstore.format.manifest import Manifest, Receipt, sha256_of, sorted_receipts
from ckptstore.format.record import Record
from ckptstore.job import Job
from ckptstore.log import Log
from ckptstore.storage.base import Disk, Storage
from ckptstore.storage.second_look import looked_twice
from ckptstore.transfer import RangeRead, Transfer, Wanted
from ckptstore.transfer.opened import OpenedPlace


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFiles:
    """The files of a checkpoint in a directory on its own, and the base of the other kinds."""

    storage: Storage
    transfer: Transfer
    config: StoreConfig
    prefix: str = ""
    """The prefix of their keys: "checkpoints/<attempt>/" in a store."""
    given_group: object = None
    """The ranks that load a state together, as for `find_group`. In a store they are those of the job."""

    @staticmethod
    def at(
        place: OpenedPlace, *, prefix: str = "", record: Record | None = None, given_group: object = None
    ) -> CheckpointFiles:
        """Return the files below `prefix` in an opened place."""
        storage, transfer, config = place.storage, place.transfer, place.config
        if record is None:
            return CheckpointFiles(
                storage=storage, transfer=transfer, config=config, prefix=prefix, given_group=given_group
            )
        return CommittedFiles(
            storage=storage, transfer=transfer, config=config, prefix=prefix, given_group=given_group, record=record
        )

    @property
    def job(self) -> Job | None:
        """The job whose ranks load a state together; None outside of an open store."""
        return None

    @property
    def record(self) -> Record | None:
        """The record that committed the checkpoint; None outside of a store."""
        return None

    @property
    def step(self) -> int:
        """The step that was saved."""
        return self.read_manifest()[0].step

    @property
    def number(self) -> int | None:
        """The number of the record; None without one."""
        return None if self.record is None else self.record.number

    @property
    def uri(self) -> str:
        """The place of the files, without secrets."""
        return f"{self.storage.uri.rstrip('/')}/{self.prefix}".rstrip("/")

    @property
    def is_durable(self) -> bool:
        """True unless it is on the disks of nodes alone."""
        return True

    @property
    def is_on_nodes(self) -> bool:
        """True if the files are read from the disks of nodes."""
        return False

    def read_manifest(self) -> tuple[Manifest, bytes]:
        """Return the manifest, and its bytes as stored.

        For a directory that torch's DCP wrote on its own, it is made from a listing, without digests. Raises
        CheckpointGone if there is no manifest, CheckpointDamaged if it is not the committed one.
        """
        key = self.prefix + MANIFEST_NAME
        try:
            data = looked_twice(self.storage, key, lambda: self._manifest_bytes(key))
        except FileMissing:
            stock = _stock_manifest(self) if self.record is None else None
            if stock is None:
                raise CheckpointGone(
                    f"{self.uri} has no manifest: it was removed, was never complete or, in a replica, is not here yet",
                    file=MANIFEST_NAME,
                ) from None
            return stock, stock.encode()
        return Manifest.decode(data, file=key), data

    def _manifest_bytes(self, key: str) -> bytes:
        return self.storage.read(key)

    def alone(self) -> CheckpointFiles:
        """Return a copy for a process that works on its own; it can be pickled."""
        return replace(self, given_group=None)

    @contextmanager
    def held(self, *, is_handed_out: bool = False) -> Iterator[None]:
        """Protect the files from deletion while the context lasts. A directory on its own needs no protection."""
        yield

    @contextmanager
    def missing_is_damage(self) -> Iterator[None]:
        """Raise CheckpointDamaged for a file that is missing inside, CheckpointGone if the checkpoint was removed."""
        try:
            yield
        except FileMissing as error:
            self._check_there(error)
            step = self.record.entry.step if self.record else None
            name = (error.file or "").removeprefix(self.prefix)
            raise CheckpointDamaged(f"{name or 'A file'} is missing: {error.message}", step=step, file=name) from error

    def _check_there(self, error: FileMissing) -> None:
        """Raise CheckpointGone if the whole checkpoint was removed."""

    def read(self, ranges: Sequence[RangeRead]) -> None:
        """Read as `Transfer.read` does, but treat a missing file as damage."""
        with self.missing_is_damage():
            self.transfer.read(ranges)

    def check_complete(self, manifest: Manifest) -> None:
        """Raise CheckpointDamaged unless every file exists with its size. Costs one listing."""
        looked_twice(self.storage, self.prefix, lambda: self._check_listed(manifest))

    def _check_listed(self, manifest: Manifest) -> None:
        stored = self.stored_sizes(manifest)
        for receipt in manifest.files:
            found = stored.get(receipt.name)
            if found is None:
                raise self._missing(receipt, manifest.step)
            if found != receipt.size_bytes:
                raise _differs(receipt, f"has {found} bytes", manifest.step)

    def _missing(self, receipt: Receipt, step: int) -> Exception:
        return _differs(receipt, "is missing", step)

    def check_here(self, manifest: Manifest) -> None:
        """Raise StorageError if a directory on this node would lack files that lie on other nodes."""

    def is_broken_by(self, error: StorageError) -> bool:
        """Return True if the error counts as damage, so that an older checkpoint may be used.

        A place that does not answer now, denies access or is full does not.
        """
        return False

    def receipts_here(self, manifest: Manifest) -> tuple[Receipt, ...]:
        """Return the files that this process should reach."""
        return manifest.files

    def stored_sizes(self, manifest: Manifest) -> dict[str, int]:
        """Return the sizes by name: of all files in its directory, listed in the manifest or not, and of the files that
        lie in other checkpoints."""
        sizes = {file.key.removeprefix(self.prefix): file.size_bytes for file in self.storage.list(self.prefix)}
        elsewhere = {self.key_of(receipt): receipt.name for receipt in manifest.files if receipt.attempt is not None}
        for attempt in manifest.references:
            for file in self.storage.list(f"{CHECKPOINT_PREFIX}{attempt}/"):
                if file.key in elsewhere:
                    sizes[elsewhere[file.key]] = file.size_bytes
        return sizes

    def key_of(self, receipt: Receipt) -> str:
        """Return the key of a file. Raises CheckpointDamaged if it lies in another checkpoint and this one is outside
        of a store."""
        if receipt.attempt is not None:
            raise CheckpointDamaged(
                f"{receipt.name} lies in the directory {receipt.attempt} of the store that this was copied from",
                file=receipt.name,
                hint="Copy checkpoints that refer to others with `ckptstore cp`, which makes them whole",
            )
        return self.prefix + receipt.name

    def wanted(self, receipt: Receipt) -> Wanted:
        """Return the request to the transfer to fetch or check the file of a receipt."""
        return Wanted(self.key_of(receipt), receipt.size_bytes, receipt.digest)

    def read_file(self, receipt: Receipt) -> bytes:
        """Return the checked bytes of a small file."""
        data = bytearray(receipt.size_bytes)
        checks = () if receipt.digest is None else ((receipt.size_bytes, receipt.digest),)
        self.read([RangeRead(self.key_of(receipt), 0, (memoryview(data),), checks)])
        return bytes(data)

    def write_user_metadata(self, data: bytes) -> None:
        """Replace the user's metadata. Raises InvalidMetadata if it cannot be changed."""
        key = self.prefix + USER_METADATA_NAME
        self.storage.write(key, [memoryview(data)])
        self.storage.persist([key])

    def check_can_be_sent(self) -> None:
        """Raise InvalidInput if another process could not open the checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommittedFiles(CheckpointFiles):
    """The files of a checkpoint in a store."""

    record: Record
    job: Job | None = None

    @property
    def step(self) -> int:
        return self.record.entry.step

    def _manifest_bytes(self, key: str) -> bytes:
        data = self.storage.read(key)
        digest, entry = sha256_of(data), self.record.entry
        if digest != entry.manifest_sha256:
            raise CheckpointDamaged(
                f"The manifest of {self.uri} has SHA-256 {digest}, the log says {entry.manifest_sha256}",
                step=entry.step,
                file=MANIFEST_NAME,
            )
        return data

    def alone(self) -> CommittedFiles:
        return replace(self, job=None, given_group=None)

    @contextmanager
    def held(self, *, is_handed_out: bool = False) -> Iterator[None]:
        """Protect the checkpoint from a prune while the context lasts, by a lease on a disk.

        On other storages the grace period has to suffice. Raises CheckpointGone if a prune came first.
        `is_handed_out` as for `leases.hold`.
        """
        if not isinstance(self.storage, Disk):
            yield
            return
        from ckptstore.upkeep import leases

        with leases.hold(self.storage, self.record.number, is_handed_out=is_handed_out):
            # A prune reads the leases after it has written its record. If the log has no such record yet, it will see
            # this lease.
            log = self.job.log if self.job else Log(self.storage)
            newest = log.newest()
            if newest is None or self.record.number not in {*newest.state.live, *newest.state.trash}:
                raise CheckpointGone(f"Step {self.step} was removed", step=self.step)
            yield

    def _check_there(self, error: FileMissing) -> None:
        if not any(True for _ in self.storage.list(self.prefix + MANIFEST_NAME)):
            raise CheckpointGone(f"Step {self.step} was removed while it was read", step=self.step) from error

    def key_of(self, receipt: Receipt) -> str:
        if receipt.attempt is None:
            return self.prefix + receipt.name
        return f"{CHECKPOINT_PREFIX}{receipt.attempt}/{receipt.name}"


def files_of(job: Job, record: Record) -> CommittedFiles:
    """Return the files of a committed checkpoint."""
    return CommittedFiles(
        storage=job.storage,
        transfer=job.transfer,
        config=job.config,
        prefix=record.entry.prefix,
        record=record,
        job=job,
    )


def _differs(receipt: Receipt, what: str, step: int) -> CheckpointDamaged:
    return CheckpointDamaged(
        f"{receipt.name} {what}, the manifest says {receipt.size_bytes} bytes",
        step=step,
        rank=receipt.rank,
        file=receipt.name,
    )


def _stock_manifest(files: CheckpointFiles) -> Manifest | None:
    """Make a manifest for a directory of stock DCP; None for any other directory."""
    listed = {file.key.removeprefix(files.prefix): file for file in files.storage.list(files.prefix)}
    if DCP_METADATA_NAME not in listed:
        return None
    name = files.uri.rpartition("/")[2]
    step = re.search(r"(\d{1,10})$", name)
    ranks = [int(match[1]) for file in listed if (match := re.fullmatch(r"__(\d+)_\d+\.distcp", file))]
    return Manifest(
        store_id="",
        step=int(step[1]) if step else 0,
        epoch=0,
        attempt=name,
        kind="state",
        world_size=max(ranks, default=0) + 1,
        created_at=max(file.modified_seconds for file in listed.values()),
        files=tuple(sorted_receipts(Receipt(key, file.size_bytes, None, 0) for key, file in listed.items())),
    )
