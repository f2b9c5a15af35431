"""`ckptstore serve`: what is in stores, as a page that keeps up with them."""

from __future__ import annotations

import signal
from contextlib import ExitStack
from typing import Any

import click

from ckptstore.runtime.extras import needs
from ckptstore.tools.cli.commands.report import opened_overview, tell_trouble, trees_option
from ckptstore.tools.cli.kinds import STORE
from ckptstore.tools.cli.options import fast_option, price_option, storage_option


@click.command()
@click.argument("stores", type=STORE, nargs=-1, required=True, metavar="STORE...")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=0,
    show_default=True,
    metavar="PORT",
    help="Port to serve on; 0 picks a free one.",
)
@trees_option
@price_option
@fast_option
@storage_option
def command(
    stores: tuple[str, ...],
    port: int,
    num_trees: int,
    prices: dict[str, float],
    fast_path: str | None,
    storage_options: dict[str, Any],
) -> None:
    """Serve the page of `report` on this machine, kept up to date.

    The first line on stdout is its address at 127.0.0.1, with a random token: whoever has the address can read the
    page, and nobody can change anything. Ctrl-C ends it. Needs the extra "serve".
    """
    needs("serve", what="ckptstore serve")
    from ckptstore.tools.report.serving import LISTING_REST_SECONDS, Served, serve

    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # what is open is closed then too
    try:
        with ExitStack() as stack:
            overview = opened_overview(
                stack,
                stores,
                storage_options,
                num_trees=num_trees,
                prices=prices,
                fast_path=fast_path,
                is_live=True,
                rest_seconds=LISTING_REST_SECONDS,
            )
            document = overview.look()
            if len(overview.errors) == len(overview.sightings):
                raise next(iter(overview.errors.values()))
            tell_trouble(document)
            serve(Served(overview), port, tell=click.echo)
    finally:
        signal.signal(signal.SIGTERM, before)
