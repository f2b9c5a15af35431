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
@click.option("--once", is_flag=True, help="Commit what is finished now, and end.")
@agent_options
def command(folder: str, store: str, once: bool, as_json: bool, events_file: str | None, **options: Any) -> None:
    """Commit each finished checkpoint in FOLDER to STORE, until SIGTERM or Ctrl-C.

    For a trainer that is started otherwise, and for a folder of an earlier run (--once). Nothing is restored; see
    `ckptstore restore-folder`. What is in the store already is not committed again.
    """
    with logged_events(as_json=as_json, events_file=events_file):
        click.get_current_context().exit(watch(plan_of(store, folder, options), once=once))
