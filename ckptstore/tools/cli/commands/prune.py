"""`ckptstore prune`: apply retention, and delete what is in the trash for long enough."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from ckptstore.retention import Policy, Verdict
from ckptstore.runtime.shown import show_duration, show_size
from ckptstore.tools.cli.kinds import DURATION, STORE
from ckptstore.tools.cli.options import as_json, dry_run, keep_option, storage_option
from ckptstore.tools.cli.output import echo_table, print_json
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
    running job resumed from always stay. A rule with "weights:" before it keeps checkpoints without the optimizer. Then
    checkpoints that have been in the trash for the grace period are deleted. Without --keep, that is all. Try it with
    --dry-run.
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
                verdicts=[asdict(item) for item in verdicts],
                removed=[_to_json(item) for item in removed],
                left=[_to_json(item) for item in left],
                removed_bytes=sum(item.size_bytes for item in removed),
            )
            return
    _echo(verdicts, removed, left, dry_run=dry_run)


def _decision(item: Verdict) -> str:
    if item.drops:
        return f"keep without {', '.join(item.drops)}"
    return "keep" if item.keep else "to the trash"


def _to_json(item: Trashed) -> dict[str, Any]:
    return {
        "number": item.number,
        "step": item.step,
        "size_bytes": item.size_bytes,
        "due_in_seconds": item.due_in_seconds,
        "held_by": item.held_by,
    }


def _echo(verdicts: list[Verdict], removed: list[Trashed], left: list[Trashed], *, dry_run: bool) -> None:
    rows = [(str(item.step), _decision(item), item.reason) for item in verdicts]
    rows += [(str(item.step), "delete", f"{show_size(item.size_bytes)}, long enough in the trash") for item in removed]
    for item in left:
        why = item.held_by or f"{show_size(item.size_bytes)}, may be deleted in {show_duration(item.due_in_seconds)}"
        rows.append((str(item.step), "in the trash", why))
    if not rows:
        click.echo("nothing to delete")
        return
    if dry_run:
        click.echo("dry run: nothing is changed")
    echo_table(("step", "decision", "why"), rows)
    waiting = [item for item in left if item.held_by is None]
    if waiting:
        size = show_size(sum(item.size_bytes for item in waiting))
        seconds = show_duration(max(item.due_in_seconds for item in waiting))
        click.echo(f"a prune frees {size} more in {seconds}, or with --grace 0 now")
