"""`ckptstore best`: where the best checkpoint by a metric lies, for scripts."""

from __future__ import annotations

from typing import Any, Literal

import click

from ckptstore.cli.kinds import METRIC, STORE
from ckptstore.cli.options import as_json, storage_option
from ckptstore.cli.output import checkpoint_json, print_json
from ckptstore.cli.targets import opened_store
from ckptstore.errors import NoUsableCheckpoint


@click.command()
@click.argument("store", type=STORE)
@click.argument("metric", type=METRIC)
@click.option(
    "--mode", type=click.Choice(["min", "max"]), help="Which is better; names such as eval_loss and accuracy tell it."
)
@storage_option
@as_json
def command(
    store: str, metric: str, mode: Literal["min", "max"] | None, storage_options: dict[str, Any], as_json: bool
) -> None:
    """Print the URI of the checkpoint of STORE with the best METRIC. NaN and infinities are never best."""
    with opened_store(store, storage_options) as opened:
        checkpoint = opened.best(metric, mode=mode)
        if checkpoint is None:
            raise NoUsableCheckpoint(f"No checkpoint in {opened.uri} has a finite metric {metric!r}")
        if as_json:
            print_json(checkpoint=checkpoint_json(checkpoint))
        else:
            click.echo(checkpoint.uri)
