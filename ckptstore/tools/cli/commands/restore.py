"""`ckptstore restore`: bring a checkpoint back from the trash."""

from __future__ import annotations

from typing import Any

import click

from ckptstore.errors import InvalidInput
from ckptstore.tools.cli.kinds import STORE
from ckptstore.tools.cli.options import as_json, storage_option
from ckptstore.tools.cli.output import checkpoint_json, print_json
from ckptstore.tools.cli.targets import find_target, opened_store


@click.command()
@click.argument("target", type=STORE)
@click.option("--pin/--no-pin", default=True, show_default=True, help="Pin it, or leave it to retention.")
@click.option("--number", type=int, metavar="N", help="Which one, where the trash has several of the step.")
@storage_option
@as_json
def command(target: str, pin: bool, number: int | None, storage_options: dict[str, Any], as_json: bool) -> None:
    """Bring STORE@STEP back from the trash, if all its files are there; `ls --trash` lists what there is.

    It is pinned, because the rule that dropped it would drop it again at the next save.
    """
    wanted = find_target(target, storage_options)
    if not isinstance(wanted.step, int):
        raise InvalidInput(f"{target} names no step", hint="Write STORE@STEP; `ls --trash` lists what is there")
    with opened_store(wanted.uri, storage_options) as store:
        checkpoint = store.restore(wanted.step, number=number, pin=pin)
        is_latest = checkpoint == store.latest()
        if as_json:
            print_json(checkpoint=checkpoint_json(checkpoint), is_pinned=pin, is_latest=is_latest)
            return
    click.echo(f"step {checkpoint.step} is live again{', and the latest' if is_latest else ''}")
    if pin:
        click.echo(f"it is pinned; `ckptstore unpin {target}` gives it back to retention")
    else:
        click.echo("it is not pinned: the next save drops it again if its retention does not keep it")
