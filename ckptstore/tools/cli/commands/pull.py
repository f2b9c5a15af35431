"""`ckptstore pull`: published weights in a local directory, now or whenever a version comes."""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING, Any

import click

from ckptstore.errors import InvalidInput, StorageUnavailable
from ckptstore.runtime.extras import needs
from ckptstore.runtime.shown import show_size
from ckptstore.tools.cli.kinds import DURATION
from ckptstore.tools.cli.options import as_json, storage_option
from ckptstore.tools.cli.output import print_json

if TYPE_CHECKING:
    from ckptstore.extensions.publication.subscription import Applied

_STDERR = 2


@click.command()
@click.argument("uri")
@click.argument("directory", type=click.Path())
@click.option("--version", type=int, metavar="N", help="This version, not the newest.")
@click.option("--base", metavar="DIR", help="The model on which the first delta of another publisher builds.")
@click.option(
    "--exec",
    "program",
    metavar="CMD",
    help="Run CMD in a shell after each version, with CKPTSTORE_VERSION and CKPTSTORE_DIRECTORY in its environment.",
)
@click.option("--follow", is_flag=True, help="Go on, and pull each new version.")
@click.option("--timeout", type=DURATION, default=600.0, show_default="10m", help="Longest wait for a version.")
@click.option("--peers", metavar="HOSTS", help="Nodes that pull the same: host:port,host:port or one DNS name:port.")
@storage_option
@as_json
def command(
    uri: str,
    directory: str,
    version: int | None,
    base: str | None,
    program: str | None,
    follow: bool,
    timeout: float,
    peers: str | None,
    storage_options: dict[str, Any],
    as_json: bool,
) -> None:
    """Bring DIRECTORY to the newest version of the weights at URI.

    URI is a publication, or a place with directories such as weight_v000123 that slime, miles or CoreWeave's tools
    leave. DIRECTORY becomes a model of Hugging Face and is exchanged for the next version in one step. Only what
    changed is fetched, and every tensor is compared with its digest.

    A CMD that fails ends the command, and is run again by the next one: the version counts once it has succeeded.
    With --follow the wait for a new version starts anew each time; after --timeout without one the command fails.
    """
    needs("pull")
    from ckptstore.extensions.publication.subscription import Subscription

    if follow and version is not None:
        raise InvalidInput("--follow and --version mean different things", hint="Leave one of them out")
    then = None if program is None else lambda applied: _run(program, applied, as_json=as_json)
    with Subscription(uri, directory, base=base, storage_options=storage_options, peers=peers) as subscription:
        is_first = True
        while True:
            if version is None and (subscription.version is None or not is_first):
                try:
                    subscription.wait(timeout_seconds=timeout)
                except TimeoutError as error:
                    raise StorageUnavailable(str(error), hint="Look whether anything publishes there") from None
            try:
                applied = subscription.apply(version, timeout_seconds=timeout, then=then)
            except TimeoutError as error:
                raise StorageUnavailable(str(error), hint="Let it end, or give a longer --timeout") from None
            _show(applied, as_json=as_json)
            if not follow:
                return
            is_first = False


def _run(program: str, applied: Applied, *, as_json: bool) -> None:
    """Run the program in a shell; with `as_json` what it prints goes to stderr. Raises InvalidInput if it fails."""
    variables = {"CKPTSTORE_VERSION": str(applied.version), "CKPTSTORE_DIRECTORY": str(applied.path)}
    output = _STDERR if as_json else None
    done = subprocess.run(["sh", "-c", program], env={**os.environ, **variables}, stdout=output)
    if done.returncode:
        raise InvalidInput(
            f"{program} ended with {done.returncode} for version {applied.version}, which is in {applied.path}",
            hint="Run the same command again once the program can succeed: it is run again, and nothing is fetched",
        )


def _show(applied: Applied, *, as_json: bool) -> None:
    if as_json:
        print_json(
            directory=str(applied.path),
            published_version=applied.version,
            previous=applied.previous,
            is_changed=applied.is_changed,
            is_full=applied.is_full,
            num_deltas=applied.num_deltas,
            fetched_bytes=applied.fetched_bytes,
            seconds=applied.seconds,
            metadata=dict(applied.metadata),
            notices=applied.notices,
        )
        return
    for notice in applied.notices:
        click.echo(f"note: {notice}")
    if not applied.is_changed:
        click.echo(f"{applied.path} is at version {applied.version}")
        return
    ways = ["a full version"] * applied.is_full + [f"{applied.num_deltas} deltas"] * (applied.num_deltas > 0)
    size = show_size(applied.fetched_bytes)
    click.echo(
        f"{applied.path} is at version {applied.version} now: {' and '.join(ways)}, {size} in {applied.seconds:.2f} s"
    )
