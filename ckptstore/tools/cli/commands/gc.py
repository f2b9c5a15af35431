"""`ckptstore gc`: remove what crashes left behind."""

from __future__ import annotations

from typing import Any

import click

from ckptstore.runtime.shown import printable, show_size
from ckptstore.tools.cli.kinds import STORE
from ckptstore.tools.cli.options import as_json, dry_run, storage_option
from ckptstore.tools.cli.output import print_json
from ckptstore.tools.cli.targets import opened_store


@click.command()
@click.argument("store", type=STORE)
@dry_run
@click.option(
    "--claim",
    is_flag=True,
    help="Take the store over from a dead job first. A job that is alive is fenced off: it cannot commit any more.",
)
@storage_option
@as_json
def command(store: str, dry_run: bool, claim: bool, storage_options: dict[str, Any], as_json: bool) -> None:
    """Delete what crashed saves have left behind.

    That is saves that can never be committed, and uploads that were never finished. Those of the job or copy that owns
    the store are left, since it may be alive, unless --claim takes the store over. Messages of ranks that only read are
    left too, and on a disk files that are being read or linked.
    """
    with opened_store(store, storage_options) as opened:
        found = opened.collect_garbage(claim=claim, dry_run=dry_run)
        if as_json:
            print_json(
                uri=opened.uri,
                dry_run=dry_run,
                attempts=[{"directory": name, "size_bytes": size} for name, size in found.attempts.items()],
                unfinished=found.unfinished,
                exchanges=found.exchanges,
                left=[{"name": name, "reason": reason} for name, reason in found.left.items()],
                size_bytes=found.size_bytes,
            )
            return
    verb = "would be removed" if dry_run else "removed"
    for name, size_bytes in found.attempts.items():
        click.echo(printable(f"{verb}: {name}, {show_size(size_bytes)}"))
    for name in found.unfinished:
        click.echo(printable(f"{verb}: unfinished: {name}"))
    for name in found.exchanges:
        click.echo(printable(f"{verb}: {name}"))
    for name, reason in found.left.items():
        click.echo(printable(f"left: {name}: {reason}"))
    if not (found.attempts or found.unfinished or found.exchanges or found.left):
        click.echo("nothing to remove")
