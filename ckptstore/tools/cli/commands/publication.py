"""Commands for weights of rollout and serving nodes: `publish`, and `pull` into a local directory."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable
from typing import TYPE_CHECKING

import click

from ckptstore.checkpoint import Checkpoint
from ckptstore.errors import InvalidInput, StorageUnavailable
from ckptstore.runtime.extras import needs
from ckptstore.runtime.shown import show_size
from ckptstore.tools.cli.command import Answer, Call, command, parse_target
from ckptstore.tools.cli.options import DURATION, NAMES, TARGET, option
from ckptstore.tools.cli.output import checkpoint_json, picked

if TYPE_CHECKING:
    from ckptstore.extensions.publication.subscription import Applied

_STDERR = 2


@command(
    TARGET,
    click.Argument(["uri"]),
    *NAMES,
    option("--with DIR", "Add the other files in DIR: a model's config and tokenizer.", "config_from"),
    option("--anchor-every", "Most deltas on one full version.", type=int, default=20),
    option("--keep", "How many full versions, with their deltas, to keep.", type=int, default=2),
    option("--checksum [strong|adler32]", "The digests of tensors; adler32 for CoreWeave's readers.", default="strong"),
    option("--follow", "Go on, and publish each new checkpoint of STORE."),
)
def publish(call: Call) -> Answer:
    """Publish the weights of a checkpoint at URI, under its step.

    URI is a place of its own, which `ckptstore pull` and Subscription read, and readers of directories such as
    weight_v000123. The whole of the weights is held in memory, twice. A delta needs the version before in memory: so
    one call alone publishes a full version, and --follow publishes deltas.
    """
    needs("publish")
    from ckptstore.extensions.publication.from_store import weights_of
    from ckptstore.extensions.publication.publishing import open_publication

    target = parse_target(call.target)
    if call.follow and target.step is not None:
        raise InvalidInput(f"--follow takes a store, and {call.target} is one checkpoint", hint="Leave the step out")
    of_target, of_uri = call.options_by_place(call.target, call.uri)
    how = picked(call, "anchor_every", "keep", "checksum", "config_from")
    publication = call.open(open_publication(call.uri, **how, storage_options=of_uri, group="solo"))
    published = -1
    found: Iterable[Checkpoint]
    if call.follow:
        published = max((entry.checkpoint.step for entry in publication.store.entries()), default=-1)
        found = call.open_store(target.uri, of_target).follow(latest_only=True)
    else:
        found = [call.open_checkpoint(call.target, of_target)]
    for checkpoint in found:
        if checkpoint.step <= published:  # by this command, before it was started again
            continue
        weights = weights_of(checkpoint, include=call.include or None, strip_prefix=call.strip_prefix)
        metadata = {"checkpoint": checkpoint.uri, "step": checkpoint.step}
        version = publication.publish(checkpoint.step, weights, metadata=metadata)
        fields = {"published_version": version.step, "size_bytes": version.size_bytes}
        yield {"checkpoint": checkpoint_json(checkpoint), **fields}
        size = show_size(version.size_bytes)
        yield f"version {version.step}: {len(weights)} tensors, {size} stored at {publication.store.uri}"


@command(
    click.Argument(["uri"]),
    click.Argument(["directory"], type=click.Path()),
    option("--version N", "This version, not the newest.", type=int),
    option("--base DIR", "The model on which the first delta of another publisher builds."),
    option(
        "--exec CMD",
        "Run CMD in a shell after each version, with CKPTSTORE_VERSION and CKPTSTORE_DIRECTORY in its environment.",
        "program",
    ),
    option("--follow", "Go on, and pull each new version."),
    option("--timeout", "Longest wait for a version.", type=DURATION, default=600.0, show_default="10m"),
    option("--peers HOSTS", "Nodes that pull the same: host:port,host:port or one DNS name:port."),
)
def pull(call: Call) -> Answer:
    """Bring DIRECTORY to the newest version of the weights at URI.

    URI is a publication, or a place with directories such as weight_v000123 that slime, miles or CoreWeave's tools
    leave. DIRECTORY becomes a model of Hugging Face and is exchanged for the next version in one step. Only what
    changed is fetched, and every tensor is compared with its digest.

    A CMD that fails ends the command, and is run again by the next one: the version counts once it has succeeded.
    With --follow the wait for a new version starts anew each time; after --timeout without one the command fails.
    """
    needs("pull")
    from ckptstore.extensions.publication.subscription import Subscription

    if call.follow and call.version is not None:
        raise InvalidInput("--follow and --version mean different things", hint="Leave one of them out")
    then = None if call.program is None else lambda applied: _run(call.program, applied, as_json=call.as_json)
    how = picked(call, "base", "peers", "storage_options")
    subscription = call.open(Subscription(call.uri, call.directory, **how))
    waits = call.version is None and subscription.version is None
    while True:
        hint = "Look whether anything publishes there"
        try:
            if waits:
                subscription.wait(timeout_seconds=call.timeout)
            hint = "Let it end, or give a longer --timeout"
            applied = subscription.apply(call.version, timeout_seconds=call.timeout, then=then)
        except TimeoutError as error:
            raise StorageUnavailable(str(error), hint=hint) from None
        yield {
            "directory": str(applied.path),
            "published_version": applied.version,
            "metadata": dict(applied.metadata),
            **picked(applied, "previous", "is_changed", "is_full", "num_deltas", "fetched_bytes", "seconds", "notices"),
        }
        for notice in applied.notices:
            yield f"note: {notice}"
        if not applied.is_changed:
            yield f"{applied.path} is at version {applied.version}"
        else:
            ways = ["a full version"] * applied.is_full + [f"{applied.num_deltas} deltas"] * (applied.num_deltas > 0)
            moved = f"{show_size(applied.fetched_bytes)} in {applied.seconds:.2f} s"
            yield f"{applied.path} is at version {applied.version} now: {' and '.join(ways)}, {moved}"
        if not call.follow:
            return
        waits = True


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
