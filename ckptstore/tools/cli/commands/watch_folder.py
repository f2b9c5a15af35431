"""`ckptstore watch-folder`: the agent of `ckptstore run`, for a trainer that somebody else starts."""

from __future__ import annotations

from typing import Any

import click

from ckptstore.tools.cli.agent_options import agent_options, logged_events, plan_of
from ckptstore.tools.cli.kinds import STORE
from ckptstore.tools.run.story import watch


@click.command()
@click.argument("folder")
@click.argument("store", type=STORE)
@click.option("--once", is_flag=True, help="Store what is finished now, and exit.")
@agent_options
def command(folder: str, store: str, once: bool, as_json: bool, events_file: str | None, **options: Any) -> None:
    """Store each finished checkpoint that appears in FOLDER.

    For a trainer that something else starts, or with --once for the folder of an earlier run. Runs until SIGTERM or
    Ctrl-C, or fails once nothing more can be stored. It restores nothing; `ckptstore restore-folder` does. A checkpoint
    that is in the store already is skipped.
    """
    with logged_events(as_json=as_json, events_file=events_file):
        click.get_current_context().exit(watch(plan_of(store, folder, options), once=once))
