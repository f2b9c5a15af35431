"""`ckptstore rm`: put a checkpoint in the trash, or all of a store."""

from __future__ import annotations

from typing import Any

import click

from ckptstore.checkpoint import Checkpoint
from ckptstore.errors import InvalidInput
from ckptstore.runtime.shown import show_size
from ckptstore.store import CheckpointStore
from ckptstore.tools.cli.kinds import TARGET
from ckptstore.tools.cli.options import as_json, storage_option
from ckptstore.tools.cli.output import print_json
from ckptstore.tools.cli.targets import checkpoint_in, find_target, opened_store


@click.command()
@click.argument("target", type=TARGET)
@click.option("--all", "everything", is_flag=True, help="Remove all checkpoints of STORE, the latest too.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation of --all.")
@click.option("--force", is_flag=True, help="Remove it even if it is the latest, pinned, or needed by others.")
@storage_option
@as_json
def command(
    target: str, everything: bool, yes: bool, force: bool, storage_options: dict[str, Any], as_json: bool
) -> None:
    """Put a checkpoint, or all of a store, in the trash.

    The latest, a pinned one, the one that the running job resumed from and one with files that others refer to are
    refused without --force. --all is refused if one is pinned. A prune deletes what was in the trash for the grace
    period; until then `ckptstore restore` brings it back.
    """
    wanted = find_target(target, storage_options)
    if everything == (wanted.step is not None):
        raise InvalidInput(
            f"{target} names {'one checkpoint, and --all means a store' if everything else 'no checkpoint'}",
            hint="Write STORE@STEP for one checkpoint, or STORE --all",
        )
    with opened_store(wanted.uri, storage_options) as store:
        if wanted.step is not None:
            found = [checkpoint_in(store, wanted.step)]
            store.remove(found[0].step, force=force)
        else:
            found = list(store)
            if found and not yes:
                _ask(store, found, as_json=as_json)
            store.remove_all(force=force)
        steps, size_bytes = [item.step for item in found], sum(item.size_bytes for item in found)
        latest = store.latest()
        held = {item.step: item.held_by for item in store.trash() if item.held_by is not None and item.step in steps}
        if as_json:
            print_json(
                uri=store.uri,
                trashed_steps=steps,
                size_bytes=size_bytes,
                latest_step=None if latest is None else latest.step,
            )
            return
    click.echo(f"in the trash: step {', '.join(map(str, steps))}" if steps else "there was nothing to remove")
    if latest is None:
        click.echo("no checkpoint is live: the next start begins at the beginning")
    elif force:
        click.echo(f"step {latest.step} is the latest")
    if steps:
        size = show_size(size_bytes)
        click.echo("`ckptstore restore` brings it back")
        click.echo(f"`ckptstore prune --grace 0 {wanted.uri}` frees {size}")
    for step, why in held.items():
        click.echo(f"step {step} stays in the trash: {why}")


def _ask(store: CheckpointStore, found: list[Checkpoint], *, as_json: bool) -> None:
    """Ask whether all checkpoints may go. Ends the command unless the answer is yes."""
    if as_json:
        raise InvalidInput("--json cannot ask whether all checkpoints may go", hint="Give --yes")
    size = show_size(sum(item.size_bytes for item in found))
    click.confirm(f"Put all {len(found)} checkpoints of {store.uri} ({size}) in the trash?", abort=True, err=True)
