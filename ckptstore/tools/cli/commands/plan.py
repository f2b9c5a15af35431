"""`ckptstore plan`: how often to save, and what fast checkpoints are worth to a job."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import click

from ckptstore.runtime.shown import show_size
from ckptstore.tools.cli.kinds import DURATION, SHARE, SIZE, SPEED
from ckptstore.tools.cli.options import as_json
from ckptstore.tools.cli.output import echo_table, print_json
from ckptstore.tools.planning.intervals import DALY, DALY_SOURCE, YOUNG, YOUNG_SOURCE
from ckptstore.tools.planning.outlook import DAY_SECONDS, Outlook, outlooks
from ckptstore.tools.planning.planned_job import PlannedJob

_COLUMNS = ("bucket alone", "fast, 1 copy", "fast, 2 copies")
_DECIDED_BY = {
    "failures": "failures",
    "save": "how long a save takes",
    "drain": "what the bucket gets",
    "step": "how long a step takes",
}
_ASSUMPTIONS = (
    "Failures are independent of each other, at a constant rate. One costs little beside the time between two.",
    "Saves run behind the training: a save takes its stall from it, and one begins when the one before is complete.",
    "Every node has an equal part of the state, and a disk reads as fast as it writes.",
    "Disk and network of a node work side by side. A second copy is written to the disk of the next node of a ring.",
    "The bucket gives as fast as it takes, and takes nothing else. A retry or a throttled request is not counted.",
    "A failure loses half an interval, the time until a save counts, the restart and the load.",
    "Losses are those of the best interval. Whole steps make it longer, by less than one.",
    "Files of a lost node go to the node in its place first, and are loaded from there.",
    "A disk has room for three more than are kept: one that is being saved, one that is drained, one that waits.",
)


@click.command()
@click.option(
    "--nodes", "num_nodes", type=click.IntRange(1), required=True, metavar="N", help="Number of nodes of the job."
)
@click.option(
    "--ranks-per-node",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    metavar="N",
    help="Number of processes (GPUs) on each node.",
)
@click.option(
    "--state",
    "state_bytes",
    type=SIZE,
    required=True,
    metavar="SIZE",
    help="Size of the training state of all ranks together, such as 1.2TB.",
)
@click.option(
    "--disk",
    "disk_bytes_per_second",
    type=SPEED,
    required=True,
    metavar="SPEED",
    help="Speed of a node's disk, such as 3GB/s.",
)
@click.option(
    "--network",
    "network_bytes_per_second",
    type=SPEED,
    metavar="SPEED",
    help="Speed between two nodes, such as 400Gbit/s or 12GB/s; needed to plan two copies.",
)
@click.option(
    "--bucket",
    "bucket_bytes_per_second",
    type=SPEED,
    required=True,
    metavar="SPEED",
    help="Upload speed of one node, such as 500MB/s.",
)
@click.option(
    "--bucket-total",
    "bucket_total_bytes_per_second",
    type=SPEED,
    metavar="SPEED",
    show_default="no limit",
    help="Upload speed of all nodes together.",
)
@click.option(
    "--node-mtbf",
    "node_mtbf_seconds",
    type=DURATION,
    metavar="TIME",
    show_default="never fails",
    help="Mean time between failures of one node.",
)
@click.option(
    "--job-mtbf",
    "job_mtbf_seconds",
    type=DURATION,
    metavar="TIME",
    show_default="never fails",
    help="Mean time between failures of the job that lose no node.",
)
@click.option(
    "--disk-survives",
    "disk_survives_share",
    type=SHARE,
    default=0.0,
    metavar="SHARE",
    show_default="0%",
    help="Share of node failures after which the node comes back with its disk.",
)
@click.option(
    "--several-at-once",
    "several_nodes_share",
    type=SHARE,
    default=0.0,
    metavar="SHARE",
    show_default="0%",
    help="Share of node failures that lose several nodes, or move the job to others.",
)
@click.option(
    "--stall", "stall_seconds", type=DURATION, required=True, metavar="TIME", help="Training time blocked by one save."
)
@click.option(
    "--step", "step_seconds", type=DURATION, required=True, metavar="TIME", help="Duration of one training step."
)
@click.option(
    "--restart",
    "restart_seconds",
    type=DURATION,
    default=0.0,
    metavar="TIME",
    show_default="0",
    help="Time to restart the job, before it loads.",
)
@click.option(
    "--node-hour-cost",
    type=click.FloatRange(0),
    metavar="PRICE",
    help="Price of one node for one hour, in any currency.",
)
@click.option(
    "--keep",
    type=click.IntRange(1),
    default=2,
    show_default=True,
    metavar="N",
    help="Number of fast checkpoints kept on the nodes.",
)
@click.option(
    "--bucket-keep",
    type=click.IntRange(1),
    default=3,
    show_default=True,
    metavar="N",
    help="Number of checkpoints kept in the bucket.",
)
@click.option(
    "--drain-every",
    "drain_seconds",
    type=DURATION,
    default=0.0,
    metavar="TIME",
    show_default="as often as it can",
    help="Time between uploads of fast checkpoints to the bucket.",
)
@click.option(
    "--grace",
    "grace_seconds",
    type=DURATION,
    default=3600.0,
    metavar="TIME",
    show_default="1h",
    help="Time that removed checkpoints stay in the trash.",
)
@as_json
def command(as_json: bool, **options: Any) -> None:
    """Estimate how often to save, and what failures cost.

    Compares saves to a bucket only with fast checkpoints on the nodes. Nothing is measured or written: `ckptstore
    bench` and `ckptstore doctor` measure speeds. The assumptions are printed.
    """
    job = PlannedJob(**options)
    found = outlooks(job)
    if as_json:
        print_json(
            given=asdict(job),
            outlooks=[_to_json(job, outlook) for outlook in found],
            formulas={"young": YOUNG, "daly": DALY},
            sources=[YOUNG_SOURCE, DALY_SOURCE],
            assumptions=list(_ASSUMPTIONS),
            notes=_notes(job, found),
        )
        return
    echo_table(["", *_COLUMNS[: len(found)]], _rows(job, found))
    for title, lines in (
        ("", _notes(job, found)),
        ("Formulas", [YOUNG, DALY, YOUNG_SOURCE, DALY_SOURCE]),
        ("Assumptions", _ASSUMPTIONS),
    ):
        click.echo("\n" + title if title else "")
        for line in lines:
            click.echo(f"- {line}" if title else line)


def _rows(job: PlannedJob, found: Sequence[Outlook]) -> list[list[str]]:
    lost = [outlook.lost_node_hours_per_day(job) for outlook in found]
    rows = [
        ["a save is complete after", *(_time(outlook.complete_seconds) for outlook in found)],
        ["save every", *(f"{outlook.interval_steps} steps" for outlook in found)],
        ["that is", *(_time(outlook.interval_steps * job.step_seconds) for outlook in found)],
        ["best interval", *(_time(outlook.interval_seconds) for outlook in found)],
        ["decided by", *(_DECIDED_BY[outlook.decided_by] for outlook in found)],
        ["Young 1974", *(_time(outlook.young_seconds) for outlook in found)],
        ["Daly 2006", *(_time(outlook.daly_seconds) for outlook in found)],
        ["in the bucket every", *(_time(outlook.durable_seconds) for outlook in found)],
        ["failures a day", *(f"{outlook.failures_per_day:.3g}" for outlook in found)],
        ["answered from the nodes", *(_share(outlook.answered_share) for outlook in found)],
        ["such a failure loses", *(_or_none(outlook.answered_loss_seconds) for outlook in found)],
        ["another failure loses", *(_or_none(outlook.other_loss_seconds) for outlook in found)],
        ["stalled a day", *(_time(outlook.stalled_seconds_per_day) for outlook in found)],
        ["lost a day", *(_time(outlook.lost_seconds_per_day) for outlook in found)],
        ["in node-hours", *(f"{hours:.4g}" for hours in lost)],
        ["in rank-hours", *(f"{hours * job.ranks_per_node:.4g}" for hours in lost)],
        ["in money", *(f"{hours * (job.node_hour_cost or 0):.4g}" for hours in lost)],
        ["disk of a node", *(_size(outlook.disk_bytes_per_node) for outlook in found)],
        ["bucket", *(show_size(outlook.bucket_bytes) for outlook in found)],
        ["to the bucket a day", *(show_size(outlook.bucket_bytes_per_day) for outlook in found)],
    ]
    return [row for row in rows if row[0] != "in money" or job.node_hour_cost is not None]


def _notes(job: PlannedJob, found: Sequence[Outlook]) -> list[str]:
    """Return notes on what a reader would else overlook."""
    notes = []
    best = min(found, key=lambda outlook: outlook.lost_seconds_per_day)
    alone, saved = found[0].lost_seconds_per_day, found[0].lost_seconds_per_day - best.lost_seconds_per_day
    if best.lost_seconds_per_day >= DAY_SECONDS:
        notes.append("The job gets nowhere: however it saves, failures and stalls cost all of the day.")
    elif saved < 0.01 * alone:
        notes.append("Fast checkpoints save less than 1 % of what is lost: the bucket is good enough for this job.")
    else:
        notes.append(
            f"{_COLUMNS[best.copies].capitalize()} loses least: {saved * job.num_nodes / 3600:.3g} node-hours a day"
            f" less than the bucket alone, {saved / alone:.0%} of what is lost."
        )
    if any(outlook.is_rough for outlook in found):
        notes.append("Failures cost so much here that the figures are rough: the formulas hold for rare failures.")
    if job.num_nodes == 1:
        notes.append("Two copies need two nodes.")
    elif len(found) < len(_COLUMNS):
        notes.append("Two copies are left out: --network says how fast nodes reach each other.")
    if 0 < job.drain_seconds < job.bucket_seconds:
        often = _time(job.drain_seconds)
        notes.append(f"The bucket cannot take one every {often}: newer ones take the place of older ones.")
    return notes


def _to_json(job: PlannedJob, outlook: Outlook) -> dict[str, Any]:
    hours = outlook.lost_node_hours_per_day(job)
    fields = {name: None if value in (math.inf,) else value for name, value in asdict(outlook).items()}
    return {
        **fields,
        "lost_node_hours_per_day": hours,
        "lost_rank_hours_per_day": hours * job.ranks_per_node,
        "lost_cost_per_day": None if job.node_hour_cost is None else hours * job.node_hour_cost,
    }


def _time(seconds: float) -> str:
    """Show a time with three figures: a plan compares."""
    if math.isinf(seconds):
        return "never"
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"


def _or_none(seconds: float) -> str:
    return _time(seconds) if seconds else "-"


def _size(size_bytes: float) -> str:
    return show_size(size_bytes) if size_bytes else "-"


def _share(share: float) -> str:
    """Show a share, but not "100 %" for what is not all."""
    return "all" if share == 1 else "none" if share == 0 else f"{min(share, 0.9999):.2%}"
