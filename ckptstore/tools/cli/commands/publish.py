"""`ckptstore publish`: a checkpoint's weights, for rollout and serving nodes to pull."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ckptstore.errors import InvalidInput
from ckptstore.runtime.extras import needs
from ckptstore.runtime.shown import show_size
from ckptstore.tools.cli.kinds import TARGET
from ckptstore.tools.cli.options import as_json, names_options, options_by_place, storage_option
from ckptstore.tools.cli.output import checkpoint_json, print_json
from ckptstore.tools.cli.targets import opened_checkpoint, opened_store, parse_target

if TYPE_CHECKING:
    from ckptstore.checkpoint import Checkpoint
    from ckptstore.extensions.publication.publishing import Publication


@click.command()
@click.argument("target", type=TARGET)
@click.argument("uri")
@names_options
@click.option(
    "--with", "config_from", metavar="DIR", help="Add the other files in DIR: a model's config and tokenizer."
)
@click.option("--anchor-every", type=int, default=20, show_default=True, help="Most deltas on one full version.")
@click.option(
    "--keep", type=int, default=2, show_default=True, help="How many full versions, with their deltas, to keep."
)
@click.option(
    "--checksum",
    type=click.Choice(["strong", "adler32"]),
    default="strong",
    show_default=True,
    help="The digests of tensors; adler32 for CoreWeave's readers.",
)
@click.option("--follow", is_flag=True, help="Go on, and publish each new checkpoint of STORE.")
@storage_option
@as_json
def command(
    target: str,
    uri: str,
    include: tuple[str, ...],
    strip_prefix: str,
    config_from: str | None,
    anchor_every: int,
    keep: int,
    checksum: str,
    follow: bool,
    storage_options: dict[str, Any],
    as_json: bool,
) -> None:
    """Publish the weights of a checkpoint at URI, under its step.

    URI is a place of its own, which `ckptstore pull` and Subscription read, and readers of directories such as
    weight_v000123. The whole of the weights is held in memory, twice. A delta needs the version before in memory: so
    one call alone publishes a full version, and --follow publishes deltas.
    """
    needs("publish")
    from ckptstore.extensions.publication.publishing import open_publication

    if follow and parse_target(target).step is not None:
        raise InvalidInput(f"--follow takes a store, and {target} is one checkpoint", hint="Leave the step out")
    of_target, of_uri = options_by_place(storage_options, parse_target(target).uri, uri)
    opened = open_publication(
        uri,
        anchor_every=anchor_every,
        keep=keep,
        checksum=checksum,
        config_from=config_from,
        storage_options=of_uri,
        group="solo",
    )
    with opened as publication:
        if not follow:
            with opened_checkpoint(target, of_target) as checkpoint:
                _publish(publication, checkpoint, include or None, strip_prefix, as_json=as_json)
            return
        with opened_store(parse_target(target).uri, of_target) as store:
            published = max((entry.checkpoint.step for entry in publication.store.entries()), default=-1)
            for checkpoint in store.follow(latest_only=True):
                if checkpoint.step > published:  # what this command has published before it was started again
                    _publish(publication, checkpoint, include or None, strip_prefix, as_json=as_json)


def _publish(
    publication: Publication,
    checkpoint: Checkpoint,
    include: tuple[str, ...] | None,
    strip_prefix: str,
    *,
    as_json: bool,
) -> None:
    from ckptstore.extensions.publication.from_store import weights_of

    weights = weights_of(checkpoint, include=include, strip_prefix=strip_prefix)
    metadata = {"checkpoint": checkpoint.uri, "step": checkpoint.step}
    version = publication.publish(checkpoint.step, weights, metadata=metadata)
    if as_json:
        print_json(
            checkpoint=checkpoint_json(checkpoint), published_version=version.step, size_bytes=version.size_bytes
        )
    else:
        size = show_size(version.size_bytes)
        click.echo(f"version {version.step}: {len(weights)} tensors, {size} stored at {publication.store.uri}")
