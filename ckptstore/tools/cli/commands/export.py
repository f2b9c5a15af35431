"""`ckptstore export`: a checkpoint as files of other tools."""

from __future__ import annotations

from typing import Any, Literal

import click
from click.core import ParameterSource

from ckptstore.errors import InvalidInput
from ckptstore.runtime.extras import needs
from ckptstore.runtime.shown import printable, read_size, show_size
from ckptstore.tools.cli.kinds import TARGET
from ckptstore.tools.cli.options import (
    as_json,
    engine_option,
    files_options,
    names_options,
    opened_executor,
    options_by_place,
    storage_option,
)
from ckptstore.tools.cli.output import checkpoint_json, print_json
from ckptstore.tools.cli.targets import opened_checkpoint, parse_target
from ckptstore.tools.cli.terminal import progress


@click.command()
@click.argument("target", type=TARGET)
@click.argument("directory")
@click.option(
    "--to",
    type=click.Choice(["safetensors", "torch", "dcp"]),
    default="safetensors",
    show_default=True,
    help="Format to write.",
)
@names_options
@files_options
@engine_option
@storage_option
@as_json
def command(
    target: str,
    directory: str,
    to: Literal["safetensors", "torch", "dcp"],
    include: tuple[str, ...],
    strip_prefix: str,
    shard_size: str,
    beside: str | None,
    overwrite: bool,
    engine: str,
    storage_options: dict[str, Any],
    as_json: bool,
) -> None:
    """Convert a checkpoint to safetensors, torch or DCP files.

    DIRECTORY is a path or a URI. "safetensors" is for Hugging Face libraries, "torch" for
    torch.load(weights_only=True), "dcp" for torch.distributed.checkpoint. Every byte is checked. At most 128 MiB of
    memory are used. To continue an interrupted export to "safetensors", run it again.
    """
    needs("torch")
    from ckptstore.extensions.exchange.exporting import export

    shard_size_bytes = int(read_size(shard_size))
    source = click.get_current_context().get_parameter_source("shard_size")
    if to != "safetensors" and source is not ParameterSource.DEFAULT:
        raise InvalidInput(f"--shard-size is for safetensors, and not for {to}", hint="Leave it out")
    of_target, of_directory = options_by_place(storage_options, parse_target(target).uri, directory)
    with opened_executor(engine) as executor, opened_checkpoint(target, of_target) as checkpoint:
        total_bytes = None if include else 2 * checkpoint.size_bytes  # read and written
        with progress("export", total_bytes=total_bytes, quiet=as_json):
            report = export(
                checkpoint,
                directory,
                to=to,
                include=include or None,
                strip_prefix=strip_prefix,
                shard_size_bytes=shard_size_bytes,
                overwrite=overwrite,
                beside=beside,
                storage_options=of_directory,
                executor=executor,
            )
    if as_json:
        print_json(
            checkpoint=checkpoint_json(checkpoint),
            directory=report.uri,
            format=report.kind,
            files=report.files,
            num_tensors=report.num_tensors,
            size_bytes=report.size_bytes,
            notices=report.notices,
        )
        return
    click.echo(f"{report.num_tensors} tensors, {show_size(report.size_bytes)}, in {len(report.files)} files:")
    for name in report.files:
        click.echo(printable(f"  {report.uri}/{name}"))
    for notice in report.notices:
        click.echo(printable(f"note: {notice}"))
