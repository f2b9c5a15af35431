"""`ckptstore cp`: copy a checkpoint or a whole store to another root."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import click

from ckptstore.extensions.exchange.copying import CopyReport, copy_checkpoint, copy_store
from ckptstore.extensions.exchange.salvage import salvage_store
from ckptstore.runtime.shown import printable, show_size
from ckptstore.tools.cli.kinds import TARGET
from ckptstore.tools.cli.options import (
    as_json,
    engine_option,
    opened_executor,
    options_by_place,
    parse_storage_options,
    storage_option,
)
from ckptstore.tools.cli.output import print_json
from ckptstore.tools.cli.targets import find_target, is_checkpoint, opened_checkpoint, opened_store, parse_target
from ckptstore.tools.cli.terminal import progress
from ckptstore.transfer.executor import Executor
from ckptstore.transfer.opened import OpenedPlace, open_place


@click.command()
@click.argument("source", type=TARGET)
@click.argument("destination")
@click.option(
    "--target-option",
    "target_options",
    multiple=True,
    metavar="KEY=VALUE",
    help="Like --storage-option, for DESTINATION only. Without it, --storage-option is for each of both in a bucket.",
)
@click.option(
    "--salvage", is_flag=True, help="Rescue a store that lost its log, store.json or checkpoints: copy what is intact."
)
@engine_option
@storage_option
@as_json
def command(
    source: str,
    destination: str,
    target_options: tuple[str, ...],
    salvage: bool,
    engine: str,
    storage_options: dict[str, Any],
    as_json: bool,
) -> None:
    """Copy a store or a checkpoint, and check every byte.

    DESTINATION is empty, or holds an earlier copy, whole or interrupted, which gets what came since. A store gets a log
    of its own there, with its live checkpoints and pins. STORE@STEP becomes a checkpoint directory that can be loaded
    by its path. What is left out is printed with the reason: what --salvage cannot read, and a checkpoint of which the
    copy has a later one, since it would become the latest.
    """
    of_source, of_destination = storage_options, parse_storage_options(target_options)
    if not of_destination:
        of_source, of_destination = options_by_place(storage_options, parse_target(source).uri, destination)
    if salvage:
        copy = _salvage_store
    else:
        is_whole = find_target(source, of_source).step is None and not is_checkpoint(source, of_source)
        copy = _copy_store if is_whole else _copy_checkpoint
    with (
        opened_executor(engine) as executor,
        closing(open_place(destination, storage_options=of_destination)) as target,
        progress("copy", quiet=as_json),
    ):
        report = copy(source, target, of_source, executor)
    if as_json:
        print_json(
            uri=report.uri,
            copied_steps=report.steps,
            present_steps=report.present,
            num_copied=report.num_copied,
            num_found=report.num_found,
            copied_bytes=report.copied_bytes,
            left_out=dict(report.left_out),
        )
        return
    click.echo(f"checkpoints copied to {report.uri}: {len(report.steps)}, there already: {len(report.present)}")
    for name, reason in report.left_out.items():
        click.echo(printable(f"left out: {name}: {reason}"))
    found = f"from an earlier try: {report.num_found}"
    click.echo(f"files copied: {report.num_copied}, {show_size(report.copied_bytes)}; {found}")


def _copy_store(source: str, target: OpenedPlace, storage_options: dict[str, Any], executor: Executor) -> CopyReport:
    with opened_store(source, storage_options) as store:
        return copy_store(store, target, executor=executor)


def _salvage_store(source: str, target: OpenedPlace, storage_options: dict[str, Any], executor: Executor) -> CopyReport:
    with closing(open_place(source, storage_options=storage_options)) as place:
        return salvage_store(place, target, executor=executor)


def _copy_checkpoint(
    source: str, target: OpenedPlace, storage_options: dict[str, Any], executor: Executor
) -> CopyReport:
    with opened_checkpoint(source, storage_options) as checkpoint:
        return copy_checkpoint(checkpoint, target, executor=executor)
