"""Look at the fast checkpoints on the disk of this node for a report. Nothing is written."""

from __future__ import annotations

from dataclasses import dataclass

from ckptstore.errors import CkptstoreError
from ckptstore.extensions.tier.upkeep.node_view import NodeFast, view_node
from ckptstore.format.manifest import Manifest
from ckptstore.format.record import Record
from ckptstore.job import Job
from ckptstore.tools.report.document import SeenFast, finite


@dataclass(frozen=True, slots=True)
class SeenNode:
    """One look at a directory."""

    fast: tuple[SeenFast, ...] = ()
    newest: Manifest | None = None
    """The manifest of the newest that a job could resume from."""
    not_durable_since: float | None = None
    trouble: tuple[str, ...] = ()


def look_at_node(job: Job, directory: str, store_id: str, *, newest: Record | None) -> SeenNode:
    """Return what lies below the directory for one store. What cannot be read is trouble."""
    try:
        view = view_node(directory, store_id, job.log, job.storage, newest=newest)
    except CkptstoreError as error:
        return SeenNode(trouble=(f"the fast checkpoints below {directory} cannot be looked at: {error.message}",))
    trouble = [f"the fast checkpoints below {directory} cannot be listed: {view.fault}"] if view.fault else []
    trouble += [f"the fast checkpoint {one.found.attempt} on this node: {one.fault}" for one in view.fast if one.fault]
    return SeenNode(
        fast=tuple(map(_seen, view.fast)),
        newest=view.newest.manifest if view.newest else None,
        not_durable_since=view.not_durable_since,
        trouble=tuple(trouble),
    )


def _seen(one: NodeFast) -> SeenFast:
    found, judged, certificate = one.found, one.judged, one.certificate
    manifest = certificate.manifest if certificate else None
    return SeenFast(
        attempt=str(found.attempt),
        step=found.attempt.step,
        epoch=found.attempt.epoch,
        save_number=certificate.save_number if certificate else None,
        created_at=manifest.created_at if manifest else found.changed_seconds,
        world_size=manifest.world_size if manifest else None,
        size_bytes=manifest.size_bytes if manifest else found.size_bytes,
        here_bytes=found.size_bytes,
        nodes=tuple(certificate.holders) if certificate else (),
        metrics={name: finite(value) for name, value in manifest.metrics.items()} if manifest else {},
        standing=judged.standing,
        reason=judged.reason,
        number=judged.record.number if judged.record and judged.standing == "durable" else None,
        num_missing=len(found.missing),
        is_usable=one.is_usable,
    )
