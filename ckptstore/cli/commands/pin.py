"""`ckptstore pin`: protect a checkpoint from retention."""

from __future__ import annotations

from typing import Any

import click

from ckptstore.cli.kinds import TARGET
from ckptstore.cli.options import as_json, storage_option
from ckptstore.cli.output import print_json
from ckptstore.cli.targets import opened_step


@click.command()
@click.argument("target", type=TARGET)
@storage_option
@as_json
def command(target: str, storage_options: dict[str, Any], as_json: bool) -> None:
    """Protect the checkpoint STORE@STEP from retention, until it is unpinned."""
    with opened_step(target, storage_options) as (store, step):
        store.pin(step)
        if as_json:
            print_json(uri=store.uri, step=step, is_pinned=True)
        else:
            click.echo(f"step {step} is pinned")
