"""`ckptstore prune`: apply retention, and delete what is in the trash for long enough."""

from __future__ import annotations

from typing import Any

import click

from ckptstore.retention import Policy, Verdict
from ckptstore.runtime.shown import show_duration, show_size
from ckptstore.tools.cli.kinds import DURATION, STORE
from ckptstore.tools.cli.options import as_json, dry_run, keep_option, storage_option
from ckptstore.tools.cli.output import print_json
from ckptstore.tools.cli.targets import opened_store
from ckptstore.upkeep.prune import Trashed


@click.command()
@click.argument("store", type=STORE)
@dry_run
@click.option(
    "--grace",
    "grace_seconds",
    type=DURATION,
    metavar="TIME",
    show_default="1h",
    help="Time in the trash before a checkpoint is deleted; 0 deletes at once.",
)
@keep_option
@storage_option
@as_json
def command(
    store: str,
    dry_run: bool,
    grace_seconds: float | None,
    keep: Policy | None,
    storage_options: dict[str, Any],
    as_json: bool,
) -> None:
    """Remove checkpoints by --keep rules, and empty the trash.

    With --keep, every checkpoint that no rule keeps goes to the trash. The latest, pinned ones and the one that the
    running job resumed from always stay. Then checkpoints that have been in the trash for the grace period are deleted.
    Without --keep, that is all. Try it with --dry-run.
    """
    with opened_store(store, storage_options, grace_seconds=grace_seconds) as opened:
        verdicts = [] if keep is None else opened.retain(keep, dry_run=dry_run)
        removed = opened.prune(dry_run=dry_run)
        gone = {item.number for item in removed}
        left = [item for item in opened.trash() if item.number not in gone]
        if as_json:
            print_json(
                uri=opened.uri,
                dry_run=dry_run,
                verdicts=[
                    {"number": item.number, "step": item.step, "keep": item.keep, "reason": item.reason}
                    for item in verdicts
                ],
                removed=[_to_json(item) for item in removed],
                left=[_to_json(item) for item in left],
                removed_bytes=sum(item.size_bytes for item in removed),
            )
            return
    _echo(verdicts, removed, left, dry_run=dry_run)


def _to_json(item: Trashed) -> dict[str, Any]:
    return {
        "number": item.number,
        "step": item.step,
        "size_bytes": item.size_bytes,
        "due_in_seconds": item.due_in_seconds,
        "held_by": item.held_by,
    }


def _echo(verdicts: list[Verdict], removed: list[Trashed], left: list[Trashed], *, dry_run: bool) -> None:
    for verdict in verdicts:
        becomes = "stays" if verdict.keep else "would go to the trash" if dry_run else "goes to the trash"
        click.echo(f"step {verdict.step} {becomes}: {verdict.reason}")
    for item in removed:
        click.echo(f"step {item.step} {'would be' if dry_run else 'is'} deleted: {show_size(item.size_bytes)}")
    for item in left:
        why = item.held_by or f"its grace period ends in {show_duration(item.due_in_seconds)}"
        click.echo(f"step {item.step} stays in the trash: {why}")
    waiting = [item for item in left if item.held_by is None]
    if waiting:
        size = show_size(sum(item.size_bytes for item in waiting))
        seconds = show_duration(max(item.due_in_seconds for item in waiting))
        click.echo(f"a prune frees {size} more in {seconds}, or with --grace 0 now")
    if not (verdicts or removed or left):
        click.echo("nothing to delete")
