"""`ckptstore run`: a trainer, and beside it an agent that commits what it writes."""

from __future__ import annotations

from typing import Any

import click

from ckptstore.tools.cli.agent_options import agent_options, logged_events, plan_of, print_explained, rules_of
from ckptstore.tools.cli.kinds import STORE
from ckptstore.tools.run.story import run


@click.command(context_settings={"allow_interspersed_args": False})
@click.option("--store", type=STORE, help="Store for the checkpoints; the first run creates it.")
@click.option(
    "--folder",
    metavar="DIR",
    help="Folder that the trainer writes its checkpoints to [default: by the command, or what it writes].",
)
@click.option("--dry-run", metavar="DIR", help="Print what would be taken of a folder that exists, and end.")
@agent_options
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="-- COMMAND...")
def command(
    store: str | None,
    folder: str | None,
    dry_run: str | None,
    words: tuple[str, ...],
    as_json: bool,
    events_file: str | None,
    **options: Any,
) -> None:
    """Run COMMAND, a trainer that writes checkpoints to a folder, and commit each finished one to the store.

    First the newest checkpoint that verifies is restored into the folder, unless the folder has finished a newer one
    itself. While the folder has what the store lacks, a notice says so. Signals are passed on, and the exit code is
    that of COMMAND. A storage that is away never holds up the training. On several nodes start one agent a node.
    """
    if dry_run is not None:
        click.get_current_context().exit(print_explained(dry_run, rules_of(options), as_json=as_json))
    if store is None or not words:
        raise click.UsageError("Give --store URI, and the command of the trainer after --")
    with logged_events(as_json=as_json, events_file=events_file):
        click.get_current_context().exit(run(plan_of(store, folder, options), words))
