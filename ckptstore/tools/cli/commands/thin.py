"""`ckptstore thin`: drop the optimizer, or other keys, from a checkpoint."""

from __future__ import annotations

from typing import Any

import click

from ckptstore.runtime.shown import show_size
from ckptstore.tools.cli.kinds import TARGET
from ckptstore.tools.cli.options import as_json, dry_run, storage_option
from ckptstore.tools.cli.output import print_json
from ckptstore.tools.cli.targets import opened_step


@click.command()
@click.argument("target", type=TARGET)
@click.option(
    "--drop",
    "patterns",
    required=True,
    multiple=True,
    metavar="PATTERN",
    help="Drop the keys that fit, such as 'optimizer.*'. Repeatable.",
)
@dry_run
@click.option("--force", is_flag=True, help="Thin it even if it is pinned, or needed by others.")
@storage_option
@as_json
def command(
    target: str,
    patterns: tuple[str, ...],
    dry_run: bool,
    force: bool,
    storage_options: dict[str, Any],
    as_json: bool,
) -> None:
    """Drop the optimizer, or other keys, from STORE@STEP.

    What stays is a checkpoint in its place. The whole one goes to the trash: `ckptstore restore` brings it back, and a
    prune deletes it after the grace period. The latest and the one that the running job resumed from are refused, for a
    job must be able to resume from them; a pinned one and one with files that others refer to need --force.
    """
    with opened_step(target, storage_options) as (store, step):
        report = store.thin(step, patterns, force=force, dry_run=dry_run)
        number = None if dry_run else store[step].number
        held = {item.step: item.held_by for item in store.trash() if item.held_by is not None and item.step == step}
        if as_json:
            print_json(
                uri=store.uri,
                dry_run=dry_run,
                step=step,
                number=number,
                dropped=list(report.dropped),
                num_keys=report.num_keys,
                size_bytes=report.size_bytes,
                left_bytes=report.left_bytes,
            )
            return
    before, after = show_size(report.size_bytes), show_size(report.left_bytes)
    if dry_run:
        click.echo("dry run: nothing is changed")
    click.echo(f"step {step} without {', '.join(report.dropped)}: {report.num_keys} keys, {before} before, {after} now")
    if not dry_run:
        click.echo(f"the whole one is in the trash; `ckptstore restore {target}` brings it back")
        click.echo(f"`ckptstore prune --grace 0 {store.uri}` frees {show_size(report.freed_bytes)}")
    for why in held.values():
        click.echo(f"it stays in the trash: {why}")
