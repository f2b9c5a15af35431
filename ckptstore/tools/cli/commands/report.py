"""`ckptstore report`: what is in stores, as a page or as JSON."""

from __future__ import annotations

import json
import os
import uuid
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import click

from ckptstore.errors import InvalidInput, StorageError
from ckptstore.opening import open_store
from ckptstore.runtime.shown import printable
from ckptstore.storage.uri import parse_uri
from ckptstore.tools.cli.kinds import STORE
from ckptstore.tools.cli.options import (
    as_json,
    fast_option,
    options_by_place,
    price_option,
    prices_of,
    storage_option,
    tier_at,
)
from ckptstore.tools.cli.output import redacted_command_line
from ckptstore.tools.report.document import Document
from ckptstore.tools.report.gather import NUM_TREES, Sighting
from ckptstore.tools.report.overview import Overview
from ckptstore.tools.report.page import page

trees_option = click.option(
    "--trees",
    "num_trees",
    type=click.IntRange(0, 1000),
    default=NUM_TREES,
    show_default=True,
    metavar="N",
    help="Number of checkpoints whose tensors are listed: latest, best, pinned, then newest.",
)


@click.command()
@click.argument("stores", type=STORE, nargs=-1, required=True, metavar="STORE...")
@click.option("--html", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="Write the page to FILE.")
@trees_option
@price_option
@fast_option
@storage_option
@as_json
def command(
    stores: tuple[str, ...],
    html: Path | None,
    num_trees: int,
    prices: dict[str, float],
    fast_path: str | None,
    storage_options: dict[str, Any],
    as_json: bool,
) -> None:
    """Write an HTML page, or JSON, about one or more stores.

    The page is one file that needs no network, and its path is printed. It is made from the logs, the newest manifests
    and the tensor indexes of a few checkpoints; nothing is written to a store. An existing FILE is replaced as a whole.
    If a store cannot be read, the page says so, and the exit code is that of the first such error.
    """
    if html is None and not as_json:
        raise click.UsageError("Ask for --html FILE, for --json, or for both")
    with ExitStack() as stack:
        overview = opened_overview(
            stack, stores, storage_options, num_trees=num_trees, prices=prices, fast_path=fast_path
        )
        document = overview.look()
    if len(overview.errors) == len(overview.sightings):
        raise next(iter(overview.errors.values()))
    value = document.to_json()
    if html is not None:
        write_whole(html, page(value))
        if html.is_file() and not as_json:
            click.echo(os.path.abspath(html))
    if as_json:
        click.echo(json.dumps(value, allow_nan=False))
    tell_trouble(document)
    for error in overview.errors.values():
        raise click.exceptions.Exit(error.exit_code)


def tell_trouble(document: Document) -> None:
    """Print what is wrong with the stores to stderr; what a terminal would obey is shown as an escape."""
    for store in document.stores:
        for text in (*store.health.gaps, *store.health.trouble):
            click.echo(printable(f"trouble: {store.uri}: {text}"), err=True)


def opened_overview(
    stack: ExitStack,
    stores: tuple[str, ...],
    storage_options: dict[str, Any],
    *,
    num_trees: int,
    prices: dict[str, float],
    fast_path: str | None,
    is_live: bool = False,
    rest_seconds: float = 0.0,
) -> Overview:
    """Return the stores, open until the stack is left. Raises InvalidInput for one that is named twice, for a price
    that is for none of them, and where there is no directory of fast checkpoints at the path."""
    places = [parse_uri(store).uri for store in stores]
    twice = next((place for place in places if places.count(place) > 1), None)
    if twice is not None:
        raise InvalidInput(f"{twice} is named twice", hint="Name each store once")
    tier = tier_at(fast_path)
    sightings = [
        Sighting(
            stack.enter_context(open_store(store, storage_options=options, group="solo")),
            num_trees=num_trees,
            price=price,
            needs_options=sorted(options),
            fast_directory="" if tier is None else os.path.abspath(tier.path),
            rest_seconds=rest_seconds,
        )
        for store, options, price in zip(
            stores, options_by_place(storage_options, *stores), prices_of(prices, *places), strict=True
        )
    ]
    return Overview(sightings, command=redacted_command_line(), is_live=is_live)


def write_whole(path: Path, text: str) -> None:
    """Make the file hold the text: all of it, or what it held before. A pipe or a device is written to as it is.

    Raises StorageError, which names the file.
    """
    target = Path(os.path.realpath(path))
    partial = target.with_name(f".{target.name[:100]}.{uuid.uuid4().hex[:8]}")
    try:
        if path.exists() and not path.is_file():
            path.write_text(text, encoding="utf-8", errors="replace")
            return
        partial.write_text(text, encoding="utf-8", errors="replace")  # a store may hold text that is no Unicode
        partial.replace(target)
    except (OSError, ValueError) as error:
        with suppress(OSError):
            partial.unlink()
        raise StorageError(f"{path} could not be written: {error}") from error
