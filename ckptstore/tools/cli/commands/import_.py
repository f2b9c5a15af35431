"""`ckptstore import`: files of other tools as a checkpoint."""

from __future__ import annotations

from typing import Any, Literal

import click

from ckptstore.errors import InvalidInput
from ckptstore.opening import open_store
from ckptstore.runtime.extras import needs
from ckptstore.runtime.shown import show_size
from ckptstore.tools.cli.kinds import STORE
from ckptstore.tools.cli.options import as_json, options_by_place, storage_option
from ckptstore.tools.cli.output import checkpoint_json, print_json
from ckptstore.tools.cli.terminal import progress


@click.command()
@click.argument("source")
@click.argument("store", type=STORE)
@click.option(
    "--from", "kind", type=click.Choice(["safetensors", "torch", "dcp"]), required=True, help="Format of SOURCE."
)
@click.option("--step", type=click.IntRange(0), required=True, metavar="N", help="Step of the new checkpoint.")
@click.option(
    "--metric",
    "metrics",
    multiple=True,
    metavar="NAME=NUMBER",
    help="Metric of the new checkpoint, for retention and `best`; repeatable.",
)
@click.option(
    "--include", multiple=True, metavar="PATTERN", help='Import only keys that match, such as "model.*"; repeatable.'
)
@click.option("--rename", multiple=True, metavar="OLD=NEW", help="Replace OLD by NEW at the start of keys; repeatable.")
@click.option("--allow-pickle", is_flag=True, help="Read pickles in SOURCE, which can run any code.")
@click.option(
    "--allow-bytes",
    type=click.IntRange(0),
    default=64 << 20,
    metavar="N",
    help="Most bytes of a tensor whose elements share memory; 64 MiB if left out.",
)
@click.option("--replace", is_flag=True, help="Replace the checkpoint of that step; the old one goes to the trash.")
@storage_option
@as_json
def command(
    source: str,
    store: str,
    kind: Literal["safetensors", "torch", "dcp"],
    step: int,
    metrics: tuple[str, ...],
    include: tuple[str, ...],
    rename: tuple[str, ...],
    allow_pickle: bool,
    allow_bytes: int,
    replace: bool,
    storage_options: dict[str, Any],
    as_json: bool,
) -> None:
    """Save files of other tools as a checkpoint of STORE.

    SOURCE is a path or a URI: a file of torch.save, a safetensors file or a directory of them, or a directory of
    torch.distributed.checkpoint. STORE is created if needed. Keys stay as they are, unless --rename changes them:
    "model_state_dict=model", or "=model" for a file that holds nothing but a model. No code in SOURCE is run. A job
    that writes to STORE is fenced off: it cannot commit any more.
    """
    needs("torch")
    from ckptstore.extensions.exchange.importing import import_state

    of_source, of_store = options_by_place(storage_options, source, store)
    with open_store(store, storage_options=of_store) as opened:
        with progress("import", quiet=as_json):
            checkpoint = import_state(
                source,
                opened,
                step,
                kind=kind,
                metrics=_parse_metrics(metrics),
                exists="replace" if replace else "error",
                include=include or None,
                rename=_parse_renames(rename) or None,
                allow_pickle=allow_pickle,
                allow_bytes=allow_bytes,
                storage_options=of_source,
            )
        if as_json:
            print_json(checkpoint=checkpoint_json(checkpoint), source=source, format=kind)
        else:
            click.echo(f"step {checkpoint.step}, {show_size(checkpoint.size_bytes)}, {checkpoint.uri}")


def _parse_metrics(texts: tuple[str, ...]) -> dict[str, float]:
    found = {}
    for text in texts:
        name, _, value = text.partition("=")
        try:
            found[name] = float(value if name else "")
        except ValueError:
            raise InvalidInput(f"--metric takes NAME=NUMBER, not {text!r}") from None
    return found


def _parse_renames(texts: tuple[str, ...]) -> dict[str, str]:
    found = {}
    for text in texts:
        old, equals, new = text.partition("=")
        if not equals:
            raise InvalidInput(f"--rename takes OLD=NEW, not {text!r}")
        found[old] = new
    return found
