"""`ckptstore run`: a trainer, and beside it an agent that commits what it writes."""

from __future__ import annotations

from typing import Any

import click

from ckptstore.tools.cli.agent_options import agent_options, logged_events, plan_of, print_explained, rules_of
from ckptstore.tools.cli.kinds import STORE
from ckptstore.tools.run.story import run


@click.command(context_settings={"allow_interspersed_args": False})
@click.option("--store", type=STORE, metavar="STORE", help="Store for the checkpoints; created if needed.")
@click.option(
    "--folder",
    metavar="DIR",
    show_default="found by the command, or by what it writes",
    help="Folder that the trainer writes checkpoints to.",
)
@click.option("--dry-run", metavar="DIR", help="Print which checkpoints in DIR would be stored, and exit.")
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
    """Run a trainer, and store each checkpoint that it writes.

    COMMAND is a trainer that writes checkpoints to a folder; its code needs no change. First the newest intact
    checkpoint of the store is restored into the folder, unless the folder has a newer one that is finished. Then each
    finished checkpoint is committed while the training goes on: a storage that is slow or away never blocks it. Pending
    uploads are reported.

    Signals are passed on to COMMAND, and its exit code is returned. On several nodes, start one `ckptstore run` on
    each. A restarted job fences off the old one.
    """
    if dry_run is not None:
        click.get_current_context().exit(print_explained(dry_run, rules_of(options), as_json=as_json))
    if store is None or not words:
        raise click.UsageError("Give --store URI, and the command of the trainer after --")
    with logged_events(as_json=as_json, events_file=events_file):
        click.get_current_context().exit(run(plan_of(store, folder, options), words))
