"""Estimate what the failures of a day cost, with a bucket alone and with fast checkpoints on one or two nodes. Pure.

To the first order: the loss of a day is the failures of a day, each with its mean loss, and the stalls of its saves.
That holds while a failure is rare beside what it costs; `is_rough` says where it does not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from ckptstore.tools.planning.intervals import daly_seconds, young_seconds
from ckptstore.tools.planning.planned_job import PlannedJob

DAY_SECONDS = 86400.0
MORE_ON_DISK = 3
"""Fast checkpoints beside those that are kept: one is being saved, one is drained, one waits for that."""
_ROUGH_SHARE = 0.2

Reason = Literal["failures", "save", "drain", "step"]
Copies = Literal[0, 1, 2]
"""On how many nodes each file lies; 0 for a bucket alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """One way to save, and what follows from it."""

    copies: Copies
    complete_seconds: float
    """From the call of a save until a failure can be answered with it."""
    durable_seconds: float
    """Between two checkpoints that the bucket gets."""
    mtbf_seconds: float
    """Between two failures that are answered with these saves: infinite where none is."""
    young_seconds: float
    daly_seconds: float
    interval_seconds: float
    """The best time of training between two saves."""
    interval_steps: int
    """The same in steps, at least 1."""
    decided_by: Reason
    """Why it is not another one: Daly's formula; no save begins before the one before is complete; the bucket
    gets no checkpoint sooner, and answers the other failures; nothing is saved within a step."""
    answered_share: float
    """The share of all failures after which the job goes on from the disks of its nodes."""
    answered_loss_seconds: float
    """The mean loss of one of these; 0 where there is none."""
    other_loss_seconds: float
    """The mean loss of one of the others, after which the job goes on from the bucket; 0 where there is none."""
    failures_per_day: float
    stalled_seconds_per_day: float
    lost_seconds_per_day: float
    """By failures and stalls: of each node. At most the day."""
    is_rough: bool
    """True if failures cost so much that the first order is not enough."""
    disk_bytes_per_node: float
    """At most: with those that are being saved, drained, and waiting for that."""
    bucket_bytes: float
    bucket_bytes_per_day: float

    def lost_node_hours_per_day(self, job: PlannedJob) -> float:
        """The hours lost in a day, over all nodes."""
        return self.lost_seconds_per_day * job.num_nodes / 3600


@dataclass(frozen=True, slots=True)
class _Failures:
    """Failures in a second, by what they leave."""

    kept: float
    """Every node comes back, with its disk."""
    one_lost: float
    """One node is lost with its disk."""
    many_lost: float
    """Several are."""


def outlooks(job: PlannedJob) -> list[Outlook]:
    """Return the outlooks of a bucket alone, then of fast checkpoints with one copy and, where there are two nodes and
    a network, with two."""
    found = [_of(job, 0), _of(job, 1)]
    if job.num_nodes > 1 and job.network_bytes_per_second is not None:
        found.append(_of(job, 2))
    return found


def _failures(job: PlannedJob) -> _Failures:
    of_one = job.node_failures_per_second * (1 - job.several_nodes_share)
    of_job = 1 / job.job_mtbf_seconds if job.job_mtbf_seconds else 0.0
    return _Failures(
        kept=of_job + of_one * job.disk_survives_share,
        one_lost=of_one * (1 - job.disk_survives_share),
        many_lost=job.node_failures_per_second * job.several_nodes_share,
    )


def _of(job: PlannedJob, copies: Copies) -> Outlook:
    failures, total = _failures(job), job.failures_per_second
    complete = _complete_seconds(job, copies)
    durable_least = max(job.bucket_seconds, job.drain_seconds if copies else 0.0)
    answered = [total, failures.kept, failures.kept + failures.one_lost][copies]
    mtbf = 1 / answered if answered else math.inf
    interval, decided_by = _interval(job, copies, mtbf, complete=complete, durable_least=durable_least)
    durable = max(interval, durable_least)
    from_disk = job.bytes_per_node / job.disk_bytes_per_second
    by_node = interval / 2 + complete + job.restart_seconds
    by_bucket = durable / 2 + (complete if copies else 0.0) + 2 * job.bucket_seconds + job.restart_seconds
    losses = [
        (failures.kept, by_node + from_disk, copies >= 1),
        (failures.one_lost, by_node + from_disk + max(_over_network(job), from_disk), copies == 2),
        (failures.many_lost, by_bucket, False),
    ]
    if copies == 2:
        is_gone = _both_share(job, failures, job.restart_seconds + from_disk + interval + complete)
        losses[1] = (failures.one_lost * (1 - is_gone), losses[1][1], True)
        losses.append((failures.one_lost * is_gone, by_bucket, False))
    on_nodes = [(rate, loss) for rate, loss, is_answered in losses if is_answered]
    others = [(rate, by_bucket) for rate, _, is_answered in losses if not is_answered]
    lost = sum(rate * loss for rate, loss in [*on_nodes, *others])
    stalled = job.stall_seconds / (interval + job.stall_seconds)
    return Outlook(
        copies=copies,
        complete_seconds=complete,
        durable_seconds=durable,
        mtbf_seconds=mtbf,
        young_seconds=young_seconds(job.stall_seconds, mtbf) if job.stall_seconds else 0.0,
        daly_seconds=daly_seconds(job.stall_seconds, mtbf),
        interval_seconds=interval,
        interval_steps=max(1, math.ceil(interval / job.step_seconds - 1e-9)),
        decided_by=decided_by,
        answered_share=sum(rate for rate, _ in on_nodes) / total,
        answered_loss_seconds=_mean(on_nodes),
        other_loss_seconds=_mean(others),
        failures_per_day=total * DAY_SECONDS,
        stalled_seconds_per_day=stalled * DAY_SECONDS,
        lost_seconds_per_day=min(1.0, lost + stalled) * DAY_SECONDS,
        is_rough=lost + stalled > _ROUGH_SHARE,
        disk_bytes_per_node=copies * (job.keep + MORE_ON_DISK) * job.bytes_per_node,
        bucket_bytes=(job.bucket_keep + math.ceil(job.grace_seconds / durable) + 1) * job.state_bytes,
        bucket_bytes_per_day=DAY_SECONDS / durable * job.state_bytes,
    )


def _complete_seconds(job: PlannedJob, copies: Copies) -> float:
    """Return the time of a save. Disk and network work side by side; with two copies a disk takes the files of two
    nodes."""
    if copies == 0:
        return job.bucket_seconds
    to_disk = copies * job.bytes_per_node / job.disk_bytes_per_second
    return max(to_disk, _over_network(job)) if copies == 2 else to_disk


def _over_network(job: PlannedJob) -> float:
    return job.bytes_per_node / (job.network_bytes_per_second or math.inf)


def _both_share(job: PlannedJob, failures: _Failures, alone_seconds: float) -> float:
    """Return the share of the failures of one node in which a neighbour is lost too before all files lie on two
    nodes again."""
    neighbours = min(2, job.num_nodes - 1)
    return min(1.0, neighbours * failures.one_lost / job.num_nodes * alone_seconds)


def _interval(
    job: PlannedJob, copies: Copies, mtbf: float, *, complete: float, durable_least: float
) -> tuple[float, Reason]:
    """Return the best interval, and why it is that.

    Saves that are more frequent than what reaches the bucket help against the failures that nodes answer. Less frequent
    ones would help against fewer failures of all kinds.
    """
    best = daly_seconds(job.stall_seconds, mtbf)
    decided_by: Reason = "failures"
    if copies and best > durable_least:
        of_all = daly_seconds(job.stall_seconds, 1 / job.failures_per_second)
        best, decided_by = (of_all, "failures") if of_all > durable_least else (durable_least, "drain")
    if best < complete:
        best, decided_by = complete, "save"
    if best < job.step_seconds:
        best, decided_by = job.step_seconds, "step"
    return best, decided_by


def _mean(losses: list[tuple[float, float]]) -> float:
    total = sum(rate for rate, _ in losses)
    return sum(rate * loss for rate, loss in losses) / total if total else 0.0
