"""The files of a fast checkpoint, on the disks of the nodes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import cast

from ckptstore.errors import CheckpointGone, FileMissing, InvalidInput, InvalidMetadata, StorageError
from ckptstore.extensions.tier.certificate import CERTIFICATE_NAME, Certificate
from ckptstore.extensions.tier.nodes.fast_place import FastPlace
from ckptstore.extensions.tier.nodes.held_storage import HeldStorage
from ckptstore.extensions.tier.nodes.node_disk import NodeDisk
from ckptstore.format.layout import MANIFEST_NAME
from ckptstore.format.manifest import Manifest, Receipt
from ckptstore.format.record import Record
from ckptstore.job import Job
from ckptstore.loading.checkpoint_files import CheckpointFiles
from ckptstore.storage.base import Disk
from ckptstore.storage.disk.local import LocalStorage
from ckptstore.transfer import Transfer


@dataclass(frozen=True, slots=True, kw_only=True)
class FastFiles(CheckpointFiles):
    """See `CheckpointFiles`.

    The storage is the disk of this node, which has the files of some ranks, or a `HeldStorage` over all nodes.
    """

    certificate: Certificate
    record: Record | None = None
    """The record that committed it; None if it is not known to be in the store too."""
    job: Job | None = None
    place: FastPlace | None = None
    """The fast tier of this process, if its job has opened it."""

    @property
    def step(self) -> int:
        return self.record.entry.step if self.record is not None else self.certificate.manifest.step

    @property
    def is_durable(self) -> bool:
        """See `CheckpointFiles.is_durable`. Reads the log."""
        return self.job is not None and self.job.log.commit_of(self.certificate.attempt) is not None

    @property
    def is_on_nodes(self) -> bool:
        return True

    def read_manifest(self) -> tuple[Manifest, bytes]:
        return self.certificate.manifest, self.certificate.manifest_data

    def alone(self) -> FastFiles:
        return replace(self, job=None, place=None, given_group=None)

    @contextmanager
    def held(self, *, is_handed_out: bool = False) -> Iterator[None]:
        """Lock the files on the disk of this node, so that no process of the node deletes them."""
        with ExitStack() as stack:
            if self.place is not None:
                stack.enter_context(self.place.using(str(self.certificate.attempt)))
            if isinstance(self.storage, HeldStorage):
                stack.enter_context(self.storage.held())
            else:
                disk = NodeDisk(cast(LocalStorage, self.storage), "")
                stack.enter_context(disk.reading(self.certificate.attempt))
            yield

    def _check_there(self, error: FileMissing) -> None:
        if isinstance(self.storage, HeldStorage) and self.storage.is_gone():
            step = self.certificate.manifest.step
            text = f"Step {step} was deleted from the disk of this node, and the store does not have it"
            raise CheckpointGone(text, step=step, hint="Newer ones took its place: look again") from error

    def _missing(self, receipt: Receipt, step: int) -> Exception:
        if isinstance(self.storage, HeldStorage):
            return self.storage.unreachable(receipt)
        return super(FastFiles, self)._missing(receipt, step)

    def check_here(self, manifest: Manifest) -> None:
        self.check_complete(manifest)

    def is_broken_by(self, error: StorageError) -> bool:
        """See `CheckpointFiles.is_broken_by`: True if the disk of a node could not read a file."""
        return type(error) is StorageError

    def receipts_here(self, manifest: Manifest) -> tuple[Receipt, ...]:
        if isinstance(self.storage, HeldStorage):
            return self.storage.receipts_here()
        if self.place is None or not isinstance(self.storage, Disk):
            return manifest.files
        ranks = self.certificate.holders.get(self.place.disk.node, ())
        return tuple(receipt for receipt in manifest.files if receipt.rank in ranks)

    def stored_sizes(self, manifest: Manifest) -> dict[str, int]:
        """See `CheckpointFiles.stored_sizes`. The manifest is in the certificate."""
        sizes = super(FastFiles, self).stored_sizes(manifest)
        sizes[MANIFEST_NAME] = sizes.pop(CERTIFICATE_NAME, 0)
        return sizes

    def write_user_metadata(self, data: bytes) -> None:
        raise InvalidMetadata(
            f"Step {self.step} is a fast checkpoint, whose metadata is what its save was given",
            hint="Set it on what `durable()` of its save returns",
        )

    def check_can_be_sent(self) -> None:
        raise InvalidInput(
            f"Step {self.step} lies on the disk of this node alone, and cannot be sent to another process",
            hint="Send what `durable()` of its save returns",
        )


def fast_files_of(job: Job, place: FastPlace, certificate: Certificate, record: Record | None = None) -> FastFiles:
    """Return the files of a fast checkpoint that are on this node. `record` committed it, if it is durable."""
    return FastFiles(
        storage=place.disk.storage,
        transfer=place.transfer,
        config=job.config,
        prefix=certificate.attempt.prefix,
        record=record,
        job=job,
        place=place,
        certificate=certificate,
    )


def held_files_of(
    job: Job, place: FastPlace | None, certificate: Certificate, storage: HeldStorage, record: Record | None = None
) -> FastFiles:
    """Return the files of a fast checkpoint on several nodes, with a transfer that the caller closes."""
    config = job.config
    return FastFiles(
        storage=storage,
        transfer=Transfer(storage, config=config.transfer, retry=config.retry, rank=job.transfer.rank),
        config=config,
        prefix=certificate.attempt.prefix,
        record=record,
        job=job,
        place=place,
        certificate=certificate,
    )
