"""Commands about what is in stores: `report`, a page or JSON, and `serve`, a page that keeps up with them."""

from __future__ import annotations

import json
import os
import uuid
from contextlib import suppress
from pathlib import Path

import click

from ckptstore.errors import InvalidInput, StorageError
from ckptstore.opening import open_store
from ckptstore.runtime.extras import needs
from ckptstore.runtime.shown import printable
from ckptstore.storage.uri import parse_uri
from ckptstore.tools.cli.command import Answer, Call, command
from ckptstore.tools.cli.options import FAST, PRICE, STORAGE_OPTION, STORES, option, prices_of
from ckptstore.tools.cli.output import redacted_command_line
from ckptstore.tools.cli.terminal import sigterm
from ckptstore.tools.report.document import Document
from ckptstore.tools.report.gather import NUM_TREES, Sighting
from ckptstore.tools.report.overview import Overview
from ckptstore.tools.report.page import page

TREES = option(
    "--trees N",
    "Number of checkpoints whose tensors are listed: latest, best, pinned, then newest.",
    type=click.IntRange(0, 1000),
    default=NUM_TREES,
)


@command(
    STORES,
    option("--html FILE", "Write the page to FILE.", type=click.Path(dir_okay=False, path_type=Path)),
    TREES,
    PRICE,
    FAST,
)
def report(call: Call) -> Answer:
    """Write an HTML page, or JSON, about one or more stores.

    The page is one file that needs no network, and its path is printed. It is made from the logs, the newest manifests
    and the tensor indexes of a few checkpoints; nothing is written to a store. An existing FILE is replaced as a whole.
    If a store cannot be read, the page says so, and the exit code is that of the first such error.
    """
    if call.html is None and not call.as_json:
        raise click.UsageError("Ask for --html FILE, for --json, or for both")
    overview, document = _looked_at(call)
    value = document.to_json()
    if call.html is not None:
        write_whole(call.html, page(value))
        if call.html.is_file():
            yield [os.path.abspath(call.html)]
    if call.as_json:
        click.echo(json.dumps(value, allow_nan=False))
    _tell_trouble(document)
    call.exit_code = next((error.exit_code for error in overview.errors.values()), 0)


@command(
    STORES,
    option("--port PORT", "Port to serve on; 0 picks a free one.", type=click.IntRange(0, 65535), default=0),
    TREES,
    PRICE,
    FAST,
    common=[STORAGE_OPTION],
)
def serve(call: Call) -> None:
    """Serve the page of `report` on this machine, kept up to date.

    The first line on stdout is its address at 127.0.0.1, with a random token: whoever has the address can read the
    page, and nobody can change anything. Ctrl-C ends it. Needs the extra "serve".
    """
    needs("serve", what="ckptstore serve")
    from ckptstore.tools.report import serving

    call.open(sigterm())
    overview, document = _looked_at(call, rest_seconds=serving.LISTING_REST_SECONDS)
    _tell_trouble(document)
    serving.serve(serving.Served(overview), call.port, tell=click.echo)


def _tell_trouble(document: Document) -> None:
    """Print what is wrong with the stores to stderr; what a terminal would obey is shown as an escape."""
    for store in document.stores:
        for text in (*store.health.gaps, *store.health.trouble):
            click.echo(printable(f"trouble: {store.uri}: {text}"), err=True)


def _looked_at(call: Call, rest_seconds: float | None = None) -> tuple[Overview, Document]:
    """Return the stores, and a first look at them; with a time to rest between two
    listings they are looked at again and again.

    Raises InvalidInput for one that is named twice and for a price that is for none of them, and the first error where
    no store can be read.
    """
    places = [parse_uri(store).uri for store in call.stores]
    twice = next((place for place in places if places.count(place) > 1), None)
    if twice is not None:
        raise InvalidInput(f"{twice} is named twice", hint="Name each store once")
    of_stores = zip(call.stores, call.options_by_place(*call.stores), prices_of(call.prices, *places), strict=True)
    tier = call.fast_tier()
    sightings = [
        Sighting(
            call.open(open_store(store, storage_options=options, group="solo")),
            num_trees=call.trees,
            price=price,
            needs_options=sorted(options),
            fast_directory="" if tier is None else os.path.abspath(tier.path),
            rest_seconds=rest_seconds or 0.0,
        )
        for store, options, price in of_stores
    ]
    overview = Overview(sightings, command=redacted_command_line(), is_live=rest_seconds is not None)
    document = overview.look()
    if len(overview.errors) == len(overview.sightings):
        raise next(iter(overview.errors.values()))
    return overview, document


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
