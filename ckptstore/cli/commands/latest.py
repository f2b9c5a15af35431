"""`ckptstore latest`: where the latest checkpoint lies, for scripts."""

from __future__ import annotations

from typing import Any

import click

from ckptstore.cli.kinds import STORE
from ckptstore.cli.options import as_json, storage_option
from ckptstore.cli.output import checkpoint_json, print_json
from ckptstore.cli.targets import opened_store
from ckptstore.errors import NoUsableCheckpoint


@click.command()
@click.argument("store", type=STORE)
@storage_option
@as_json
def command(store: str, storage_options: dict[str, Any], as_json: bool) -> None:
    """Print the URI of the latest checkpoint of STORE."""
    with opened_store(store, storage_options) as opened:
        checkpoint = opened.latest()
        if checkpoint is None:
            raise NoUsableCheckpoint(f"There is no checkpoint in {opened.uri}")
        if as_json:
            print_json(checkpoint=checkpoint_json(checkpoint))
        else:
            click.echo(checkpoint.uri)
