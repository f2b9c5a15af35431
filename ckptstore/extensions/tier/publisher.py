"""Publish fast checkpoints: files on the disks of the nodes, and on each node a certificate that they are whole.

The first certificate that is written is the commit. No request to the store is made once the job has claimed it.
"""

from __future__ import annotations

import logging
import os
import zlib
from collections.abc import Callable, Mapping
from typing import Any

from ckptstore.errors import CkptstoreError, StepExists, StorageError, StorageFull, StoreFenced
from ckptstore.events import FastCommitted, emit
from ckptstore.extensions.tier.certificate import CERTIFICATE_NAME, Certificate
from ckptstore.extensions.tier.nodes.fast_place import FastPlace
from ckptstore.extensions.tier.partner import copy_to_partner
from ckptstore.format.layout import Attempt
from ckptstore.group import Group
from ckptstore.job import Job
from ckptstore.retention import check_required
from ckptstore.runtime.beat import beat
from ckptstore.saving.commit import manifest_of
from ckptstore.saving.request import Request
from ckptstore.saving.shard import Contents, Decision
from ckptstore.saving.transaction import Destination, Ended

logger = logging.getLogger("ckptstore")


class FastPublisher:
    """See `Publisher`; it makes certificates. One for each save."""

    def __init__(self, job: Job, place: FastPlace) -> None:
        self._job, self._place = job, place
        self._save_number = 0

    @property
    def destination(self) -> Destination:
        """See `Publisher.destination`: the disk of this node, on which one rank removes files."""
        place = self._place
        return Destination(
            place.disk.storage,
            self._job.storage.uri,
            place.members.rank,
            removes=place.members.is_reporter,
            is_fast=True,
        )

    def begin(self, request: Request, decision: Decision) -> Mapping[str, Any]:
        """See `Publisher.begin`. Raises StepExists, StoreFenced when this node knows of a later job, InvalidMetric."""
        job, place = self._job, self._place
        check_required(job.policy, request.metrics, missing=job.missing)
        if job.is_fenced or place.disk.marked_epoch() > place.epoch:
            raise StoreFenced(
                "A later job has claimed the store",
                hint="Stop this job, or start it again to take the store over",
            )
        if request.options["exists"] == "error":
            self._refuse_existing(request.step)
        return {**job.claimed(), "attempt": str(job.new_attempt(request.step)), "save_number": job.next_save_number()}

    def join(self, request: Request, begun: Mapping[str, Any]) -> Attempt:
        self._save_number = self._job.highest_save_number = begun["save_number"]
        return Attempt.of(begun["attempt"])

    def publish(self, request: Request, attempt: Attempt, contents: Contents) -> bytes:
        """See `Publisher.publish`. Return the compressed certificate, which every node will have."""
        place = self._place
        place.disk.storage.persist([attempt.key(name) for name in contents.pending])
        if place.tier.copies == 2 and contents.pending:
            own = {receipt.name: receipt for receipt in contents.receipts}
            digests = {name: digest for name in contents.pending if (digest := own[name].digest) is not None}
            copy_to_partner(place, attempt, digests)
        beat()
        world_size = len(place.members.nodes)
        config, store_id = self._job.config, self._job.store_id()
        manifest = manifest_of(request, attempt, contents, config, store_id=store_id, world_size=world_size)
        return zlib.compress(place.certificate(manifest.encode(), self._save_number).encode(), 1)

    def outcome(
        self, lane: Group, attempt: Attempt, published: Any, end: Callable[[], Ended]
    ) -> Certificate | StorageFull | None:
        """See `Publisher.outcome`: every node writes the certificate, and all ranks learn whether one node did.

        An error that is raised has `committed` None, since a certificate whose write failed may still exist.
        """
        if published is None:
            certificate = self._found(attempt)
        else:
            found = self._certified(lane, attempt, zlib.decompress(published))
            if isinstance(found, StorageFull):
                return found
            certificate = found
        if certificate is not None:
            self._committed(certificate, end())
        return certificate

    def _certified(self, lane: Group, attempt: Attempt, data: bytes) -> Certificate | StorageFull:
        """Return the certificate once a node has it; StorageFull if none can have it, for want of room."""
        place, certificate = self._place, Certificate.decode(data)
        try:
            with lane.meeting("certify") as meeting:
                found = meeting.gather(self._certify(data, certificate, attempt) if place.members.is_reporter else None)
                failures = meeting.tell(lambda: [failure for failure in found if failure])
        except CkptstoreError as error:
            error.committed = None
            raise
        texts = [text for text, _ in failures]
        if len(failures) == len(place.members.all_nodes):
            why = f"No node could certify the checkpoint: {'; '.join(texts)}"
            if not all(is_full for _, is_full in failures):
                raise StorageError(why, step=attempt.step, committed=None)
            if place.members.is_reporter:
                place.saved.remove(str(attempt))
            return StorageFull(why, step=attempt.step)
        for text in texts:
            logger.warning("step %d has no certificate on a node: %s", attempt.step, text)
        return certificate

    def _certify(self, data: bytes, certificate: Certificate, attempt: Attempt) -> tuple[str, bool] | None:
        """Write the certificate on the disk of this node; return None if it succeeded. Else return the error as text,
        and True if the disk is full and has no certificate."""
        disk = self._place.disk
        try:
            for name in certificate.manifest.directories:
                disk.storage.make_directory(attempt.key(name))
            disk.certify(data, ranks=self._place.held_ranks())
        except CkptstoreError as error:
            is_written = os.path.lexists(disk.storage.local_path(attempt.key(CERTIFICATE_NAME)))
            return f"{self._place.members.node}: {error.message}", isinstance(error, StorageFull) and not is_written
        finally:
            self._place.saved.append(str(attempt))
        return None

    def _found(self, attempt: Attempt) -> Certificate | None:
        """Return the certificate on the disk of this node; None if there is none, or none that can be read."""
        try:
            return self._place.disk.certificate(attempt)
        except CkptstoreError:
            return None

    def _committed(self, kept: Certificate, ended: Ended) -> None:
        """Emit FastCommitted. On each node one rank deletes the attempts that this one supersedes."""
        if self._place.members.is_reporter:
            self._place.delete_old()
        manifest = kept.manifest
        emit(
            FastCommitted(
                step=manifest.step,
                attempt=manifest.attempt,
                rank=self._place.members.rank,
                size_bytes=manifest.size_bytes,
                seconds=ended.seconds,
                world_size=manifest.world_size,
                num_nodes=len(kept.holders),
                **ended.slowest,
                save_number=kept.save_number,
                store=self._job.storage.uri,
                metrics=dict(manifest.metrics),
            )
        )

    def _refuse_existing(self, step: int) -> None:
        """Raise StepExists for a step that is in the store, or on the disk of the leader's node."""
        job, disk = self._job, self._place.disk
        found = any(candidate.step == step for candidate in job.candidates(job.log.newest()))
        if found or any(other.step == step and disk.certificate(other) for other in disk.attempts()):
            raise StepExists(f"Step {step} is saved already", step=step, hint='Use exists="replace" to replace it')
