"""`ckptstore merge`: checkpoints of one run as one model."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ckptstore.checkpoint import Checkpoint
from ckptstore.errors import InvalidInput
from ckptstore.opening import open_store
from ckptstore.runtime.extras import needs
from ckptstore.runtime.shown import printable, read_size, show_size
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

if TYPE_CHECKING:
    from ckptstore.extensions.exchange.merging.merged_files import MergeReport

_STEPS = re.compile(r"(.+)@\{(\d{1,10})\.\.(\d{1,10})(?:\.\.(\d{1,10}))?\}", re.DOTALL)
_LISTED = 10
"""The most tensors without a place in the result that are listed."""


@click.command()
@click.argument("targets", nargs=-1, required=True, metavar="TARGET...")
@click.argument("destination")
@click.option(
    "--method",
    type=click.Choice(["average", "ema", "wsm-decay", "slerp"]),
    default="average",
    show_default=True,
    help="How the checkpoints are added up.",
)
@click.option("--weights", metavar="A,B,...", help="Share of each TARGET, for average and slerp. Default: equal.")
@click.option("--decay", type=float, metavar="X", help="Share of the average before, for ema, such as 0.9.")
@click.option(
    "--schedule",
    type=click.Choice(["1-sqrt", "cosine", "linear"]),
    help="Learning rate decay to imitate, for wsm-decay. Default: 1-sqrt.",
)
@click.option("--dtype", metavar="NAME", help="Dtype of the result, such as bfloat16. Default: as stored.")
@names_options
@files_options
@engine_option
@storage_option
@as_json
def command(
    targets: tuple[str, ...],
    destination: str,
    weights: str | None,
    shard_size: str,
    include: tuple[str, ...],
    engine: str,
    storage_options: dict[str, Any],
    as_json: bool,
    **options: Any,
) -> None:
    """Merge checkpoints into one model, tensor by tensor in float32.

    Each TARGET is STORE@STEP, the oldest first; STORE@{1000..5000..1000} stands for five of them. DESTINATION is a
    directory or a URI, which gets safetensors files, or STORE@STEP, which becomes a checkpoint of that store and passes
    through the temporary directory. Every byte is checked. At most 256 MiB of memory are used.
    """
    needs("torch")
    from ckptstore.extensions.exchange.merging.story import merge

    texts = _expanded(targets)
    target = parse_target(destination)
    if target.step is not None and not isinstance(target.step, int):
        raise InvalidInput(f"{destination} names no new step", hint="Write STORE@STEP, a directory or a URI")
    if target.step is not None and (options["overwrite"] or options["beside"]):
        raise InvalidInput("--overwrite and --with are for a directory of safetensors files", hint="Leave them out")
    *of_targets, of_destination = options_by_place(
        storage_options, *(parse_target(text).uri for text in texts), target.uri
    )
    with ExitStack() as stack:
        executor = stack.enter_context(opened_executor(engine))
        checkpoints = [
            stack.enter_context(opened_checkpoint(text, of_target))
            for text, of_target in zip(texts, of_targets, strict=True)
        ]
        is_store = isinstance(target.step, int)
        directory = destination
        if is_store:
            directory = str(
                Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ckptstore-merge-"))) / "merged"
            )
        with progress("merge", quiet=as_json):
            report = merge(
                checkpoints,
                directory,
                weights=_numbers(weights),
                include=include or None,
                shard_size_bytes=int(read_size(shard_size)),
                executor=executor,
                storage_options=None if is_store else of_destination,
                **options,
            )
        into = _into_store(report, target.uri, target.step, of_destination) if isinstance(target.step, int) else None
    _echo(report, texts, into, as_json=as_json)


def _expanded(targets: Sequence[str]) -> list[str]:
    """Return the targets with STORE@{FIRST..LAST..BY} as one for each step, as bash expands it."""
    found: list[str] = []
    for text in targets:
        match = _STEPS.fullmatch(text)
        if match is None:
            found.append(text)
            continue
        first, last, by = int(match[2]), int(match[3]), int(match[4] or 1)
        if by == 0 or last < first:
            raise InvalidInput(f"{text} stands for no step", hint="Write STORE@{FIRST..LAST..BY}, the oldest first")
        found += [f"{match[1]}@{step}" for step in range(first, last + 1, by)]
    return found


def _numbers(text: str | None) -> list[float] | None:
    try:
        return None if text is None else [float(word) for word in text.split(",")]
    except ValueError:
        raise InvalidInput(f"--weights takes numbers with commas between them, not {text!r}") from None


def _into_store(report: MergeReport, uri: str, step: int, storage_options: dict[str, Any]) -> Checkpoint:
    from ckptstore.extensions.exchange.importing import import_state

    sources = {"merged_steps": list(report.steps), "coefficients": list(report.coefficients)}
    with open_store(uri, storage_options=storage_options) as store:
        return import_state(report.uri, store, step, kind="safetensors", metadata=sources)


def _echo(report: MergeReport, targets: Sequence[str], checkpoint: Checkpoint | None, *, as_json: bool) -> None:
    if as_json:
        print_json(
            checkpoint=None if checkpoint is None else checkpoint_json(checkpoint),
            directory=None if checkpoint else report.uri,
            files=() if checkpoint else report.files,
            steps=report.steps,
            coefficients=report.coefficients,
            num_tensors=report.num_tensors,
            size_bytes=report.size_bytes,
            left_out=report.left_out,
            notices=report.notices,
        )
        return
    place = f"{len(report.files)} files:" if checkpoint is None else f"step {checkpoint.step}, {checkpoint.uri}"
    click.echo(f"{report.num_tensors} tensors, {show_size(report.size_bytes)}, in {place}")
    for name in () if checkpoint else report.files:
        click.echo(printable(f"  {report.uri}/{name}"))
    is_one_run = len(set(report.steps)) == len(report.steps)
    names = [f"step {step}" for step in report.steps] if is_one_run else map(printable, targets)
    shares = zip(names, report.coefficients, strict=True)
    click.echo("shares: " + ", ".join(f"{share:.4g} of {name}" for name, share in shares))
    for key, why in list(report.left_out.items())[:_LISTED]:
        click.echo(printable(f"left out: {key}: {why}"))
    if len(report.left_out) > _LISTED:
        click.echo(f"left out: {len(report.left_out) - _LISTED} more; --json lists them")
    for notice in report.notices:
        click.echo(printable(f"note: {notice}"))
