"""What a report says of the fast checkpoints on the disk of this node. Nothing is written."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ckptstore.errors import CkptstoreError
from ckptstore.format.record import Record
from ckptstore.format.timings import clean_node
from ckptstore.group.base import this_node
from ckptstore.job import Job
from ckptstore.report.document import SeenFast, finite
from ckptstore.upkeep.node_clear import Judged, judge, read_log
from ckptstore.upkeep.node_inventory import HeldAttempt, held_store


@dataclass(frozen=True, slots=True)
class SeenNode:
    """One look at a directory."""

    fast: tuple[SeenFast, ...] = ()
    trouble: tuple[str, ...] = ()

    @property
    def newest(self) -> SeenFast | None:
        """The newest that a job could resume from."""
        return next((one for one in reversed(self.fast) if one.is_usable), None)

    @property
    def not_durable_since(self) -> float | None:
        """When the oldest was saved that is newer than what the store has; None where there is none."""
        return min(
            (one.created_at for one in self.fast if one.standing == "only-here" and one.created_at is not None),
            default=None,
        )


def look_at_node(job: Job, directory: str, store_id: str, *, newest: Record | None) -> SeenNode:
    """What lies below the directory for one store. What cannot be read is trouble."""
    node = clean_node(this_node())
    try:
        here = held_store(directory, store_id, node=node)
        if here is None:
            return SeenNode()
        view = read_log(job.log, job.storage, store_id, here.attempts, newest=newest)
    except CkptstoreError as error:
        return SeenNode(trouble=(f"the fast checkpoints below {directory} cannot be looked at: {error.message}",))
    fast = sorted((_seen(each, judge(each, view)) for each in here.attempts), key=_order)
    trouble = [f"the fast checkpoints below {directory} cannot be listed: {here.fault}"] if here.fault else []
    return SeenNode(tuple(fast), (*trouble, *_damaged(here.attempts)))


def _seen(found: HeldAttempt, judged: Judged) -> SeenFast:
    certificate = found.certificate
    manifest = certificate.manifest if certificate else None
    usable = certificate is not None and not found.missing and judged.standing in ("only-here", "durable", "superseded")
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
        is_usable=usable,
    )


def _order(fast: SeenFast) -> tuple[int, int, str]:
    return fast.epoch, fast.save_number or 0, fast.attempt


def _damaged(attempts: Iterable[HeldAttempt]) -> list[str]:
    found = []
    for each in attempts:
        lost = f"{each.missing[0]} is not there with its size" if each.missing else ""
        if why := each.fault or lost:
            found.append(f"the fast checkpoint {each.attempt} on this node: {why}")
    return found
