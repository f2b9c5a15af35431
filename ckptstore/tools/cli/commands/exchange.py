"""Commands that copy checkpoints, or bring them to and from other tools: `cp`, `export`, `import` and `merge`."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from ckptstore.checkpoint import Checkpoint
from ckptstore.errors import InvalidInput
from ckptstore.extensions.exchange.copying import copy_checkpoint, copy_store
from ckptstore.extensions.exchange.salvage import salvage_store
from ckptstore.format.layout import MANIFEST_NAME
from ckptstore.opening import open_store
from ckptstore.runtime.extras import needs
from ckptstore.runtime.shown import read_size, show_size
from ckptstore.tools.cli.command import Answer, Call, command, find_target, holds, parse_target
from ckptstore.tools.cli.options import (
    ENGINE,
    FILES,
    NAMES,
    STORE,
    TARGET,
    complete_target,
    option,
    parse_storage_options,
)
from ckptstore.tools.cli.output import checkpoint_json, picked
from ckptstore.transfer.opened import open_place

if TYPE_CHECKING:
    from ckptstore.extensions.exchange.exporting import ExportReport
    from ckptstore.extensions.exchange.merging.merged_files import MergeReport

T = TypeVar("T")
_STEPS = re.compile(r"(.+)@\{(\d{1,10})\.\.(\d{1,10})(?:\.\.(\d{1,10}))?\}", re.DOTALL)
_LISTED = 10
"""The most tensors without a place in the result that are listed."""


@command(
    click.Argument(["source"], shell_complete=complete_target),
    click.Argument(["destination"]),
    option(
        "--target-option KEY=VALUE ...",
        "Like --storage-option, for DESTINATION only. Without it, --storage-option is for each of both in a bucket.",
        "target_options",
        callback=lambda _ctx, _param, values: parse_storage_options(values),
    ),
    option("--salvage", "Rescue a store that lost its log, store.json or checkpoints: copy what is intact."),
    ENGINE,
)
def cp(call: Call) -> Answer:
    """Copy a store or a checkpoint, and check every byte.

    DESTINATION is empty, or holds an earlier copy, whole or interrupted, which gets what came since. A store gets a log
    of its own there, with its live checkpoints and pins. STORE@STEP becomes a checkpoint directory that can be loaded
    by its path. What is left out is printed with the reason: what --salvage cannot read, and a checkpoint of which the
    copy has a later one, since it would become the latest.
    """
    source, of_source, of_destination = call.source, call.storage_options, call.target_options
    if not of_destination:
        of_source, of_destination = call.options_by_place(source, call.destination)
    executor = call.open_executor()
    target = call.open(closing(open_place(call.destination, storage_options=of_destination)))
    with call.progress("copy"):
        if call.salvage:
            place = call.open(closing(open_place(source, storage_options=of_source)))
            report = salvage_store(place, target, executor=executor)
        elif find_target(source, of_source).step is None and not holds(source, of_source, MANIFEST_NAME):
            report = copy_store(call.open_store(source, of_source), target, executor=executor)
        else:
            report = copy_checkpoint(call.open_checkpoint(source, of_source), target, executor=executor)
    yield {
        "uri": report.uri,
        "copied_steps": report.steps,
        "present_steps": report.present,
        **picked(report, "num_copied", "num_found", "copied_bytes", "left_out"),
    }
    yield f"checkpoints copied to {report.uri}: {len(report.steps)}, there already: {len(report.present)}"
    for name, reason in report.left_out.items():
        yield f"left out: {name}: {reason}"
    found = f"from an earlier try: {report.num_found}"
    yield f"files copied: {report.num_copied}, {show_size(report.copied_bytes)}; {found}"


@command(
    TARGET,
    click.Argument(["directory"]),
    option("--to [safetensors|torch|dcp]", "Format to write.", default="safetensors"),
    *NAMES,
    *FILES,
    ENGINE,
)
def export(call: Call) -> Answer:
    """Convert a checkpoint to safetensors, torch or DCP files.

    DIRECTORY is a path or a URI. "safetensors" is for Hugging Face libraries, "torch" for
    torch.load(weights_only=True), "dcp" for torch.distributed.checkpoint. Every byte is checked. At most 128 MiB of
    memory are used. To continue an interrupted export to "safetensors", run it again.
    """
    needs("torch")
    from ckptstore.extensions.exchange import exporting

    shard_size_bytes = int(read_size(call.shard_size))
    source = click.get_current_context().get_parameter_source("shard_size")
    if call.to != "safetensors" and source is not ParameterSource.DEFAULT:
        raise InvalidInput(f"--shard-size is for safetensors, and not for {call.to}", hint="Leave it out")
    of_target, of_directory = call.options_by_place(call.target, call.directory)
    executor = call.open_executor()
    checkpoint = call.open_checkpoint(call.target, of_target)
    total_bytes = None if call.include else 2 * checkpoint.size_bytes  # read and written
    with call.progress("export", total_bytes):
        report = exporting.export(
            checkpoint,
            call.directory,
            **picked(call, "to", "strip_prefix", "overwrite", "beside"),
            include=call.include or None,
            shard_size_bytes=shard_size_bytes,
            storage_options=of_directory,
            executor=executor,
        )
    yield {
        "checkpoint": checkpoint_json(checkpoint),
        "directory": report.uri,
        "format": report.kind,
        **picked(report, "files", "num_tensors", "size_bytes", "notices"),
    }
    yield from _written(report)
    for notice in report.notices:
        yield f"note: {notice}"


@command(
    click.Argument(["source"]),
    STORE,
    option("--from [safetensors|torch|dcp]", "Format of SOURCE.", "kind", required=True),
    option("--step N", "Step of the new checkpoint.", type=click.IntRange(0), required=True),
    option("--metric NAME=NUMBER ...", "Metric of the new checkpoint, for retention and `best`; repeatable."),
    option("--include PATTERN ...", 'Import only keys that match, such as "model.*"; repeatable.'),
    option("--rename OLD=NEW ...", "Replace OLD by NEW at the start of keys; repeatable."),
    option("--allow-pickle", "Read pickles in SOURCE, which can run any code."),
    option(
        "--allow-bytes N",
        "Most bytes of a tensor whose elements share memory; 64 MiB if left out.",
        type=click.IntRange(0),
        default=64 << 20,
        show_default=False,
    ),
    option("--replace", "Replace the checkpoint of that step; the old one goes to the trash."),
)
def import_(call: Call) -> Answer:
    """Save files of other tools as a checkpoint of STORE.

    SOURCE is a path or a URI: a file of torch.save, a safetensors file or a directory of them, or a directory of
    torch.distributed.checkpoint. STORE is created if needed. Keys stay as they are, unless --rename changes them:
    "model_state_dict=model", or "=model" for a file that holds nothing but a model. No code in SOURCE is run. A job
    that writes to STORE is fenced off: it cannot commit any more.
    """
    needs("torch")
    from ckptstore.extensions.exchange.importing import import_state

    of_source, of_store = call.options_by_place(call.source, call.store)
    store = call.open(open_store(call.store, storage_options=of_store))
    with call.progress("import"):
        checkpoint = import_state(
            call.source,
            store,
            call.step,
            **picked(call, "kind", "allow_pickle", "allow_bytes"),
            metrics=_pairs(call.metric, "(.+?)=(.+)", float, "--metric takes NAME=NUMBER"),
            exists="replace" if call.replace else "error",
            include=call.include or None,
            rename=_pairs(call.rename, "(.*?)=(.*)", str, "--rename takes OLD=NEW") or None,
            storage_options=of_source,
        )
    yield {"checkpoint": checkpoint_json(checkpoint), "source": call.source, "format": call.kind}
    yield f"step {checkpoint.step}, {show_size(checkpoint.size_bytes)}, {checkpoint.uri}"


def _written(report: ExportReport | MergeReport, into: Checkpoint | None = None) -> Answer:
    """Show what was written: to files, or through them into a store."""
    place = f"{len(report.files)} files:" if into is None else f"step {into.step}, {into.uri}"
    yield f"{report.num_tensors} tensors, {show_size(report.size_bytes)}, in {place}"
    for name in report.files if into is None else ():
        yield f"  {report.uri}/{name}"


def _pairs(texts: tuple[str, ...], form: str, read: Callable[[str], T], rule: str) -> dict[str, T]:
    found = {}
    for text in texts:
        try:
            if (match := re.fullmatch(form, text, re.DOTALL)) is None:
                raise ValueError(text)
            found[match[1]] = read(match[2])
        except ValueError:
            raise InvalidInput(f"{rule}, not {text!r}") from None
    return found


@command(
    click.Argument(["targets"], nargs=-1, required=True, metavar="TARGET..."),
    click.Argument(["destination"]),
    option("--method [average|ema|wsm-decay|slerp]", "How the checkpoints are added up.", default="average"),
    option("--weights A,B,...", "Share of each TARGET, for average and slerp. Default: equal."),
    option("--decay X", "Share of the average before, for ema, such as 0.9.", type=float),
    option("--schedule [1-sqrt|cosine|linear]", "Learning rate decay to imitate, for wsm-decay. Default: 1-sqrt."),
    option("--dtype NAME", "Dtype of the result, such as bfloat16. Default: as stored."),
    *NAMES,
    *FILES,
    ENGINE,
)
def merge(call: Call) -> Answer:
    """Merge checkpoints into one model, tensor by tensor in float32.

    Each TARGET is STORE@STEP, the oldest first; STORE@{1000..5000..1000} stands for five of them. DESTINATION is a
    directory or a URI, which gets safetensors files, or STORE@STEP, which becomes a checkpoint of that store and passes
    through the temporary directory. Every byte is checked. At most 256 MiB of memory are used.
    """
    needs("torch")
    from ckptstore.extensions.exchange.merging import story

    texts = _expanded(call.targets)
    target = parse_target(call.destination)
    if target.step is not None and not isinstance(target.step, int):
        raise InvalidInput(f"{call.destination} names no new step", hint="Write STORE@STEP, a directory or a URI")
    if target.step is not None and (call.overwrite or call.beside):
        raise InvalidInput("--overwrite and --with are for a directory of safetensors files", hint="Leave them out")
    *of_targets, of_destination = call.options_by_place(*texts, call.destination)
    executor = call.open_executor()
    checkpoints = [call.open_checkpoint(*pair) for pair in zip(texts, of_targets, strict=True)]
    directory = call.destination
    if target.step is not None:
        temporary = call.open(tempfile.TemporaryDirectory(prefix="ckptstore-merge-"))
        directory = os.path.join(temporary, "merged")
    with call.progress("merge"):
        report = story.merge(
            checkpoints,
            directory,
            **picked(call, "method", "decay", "schedule", "dtype", "strip_prefix", "beside", "overwrite"),
            weights=_numbers(call.weights),
            include=call.include or None,
            shard_size_bytes=int(read_size(call.shard_size)),
            executor=executor,
            storage_options=None if target.step is not None else of_destination,
        )
    into = None if target.step is None else _into_store(report, target.uri, target.step, of_destination)
    yield {
        "checkpoint": None if into is None else checkpoint_json(into),
        "directory": report.uri if into is None else None,
        "files": report.files if into is None else (),
        **picked(report, "steps", "coefficients", "num_tensors", "size_bytes", "left_out", "notices"),
    }
    yield from _written(report, into)
    is_one_run = len(set(report.steps)) == len(report.steps)
    merged = [f"step {step}" for step in report.steps] if is_one_run else texts
    shares = zip(merged, report.coefficients, strict=True)
    yield "shares: " + ", ".join(f"{share:.4g} of {name}" for name, share in shares)
    for key, why in list(report.left_out.items())[:_LISTED]:
        yield f"left out: {key}: {why}"
    if len(report.left_out) > _LISTED:
        yield f"left out: {len(report.left_out) - _LISTED} more; --json lists them"
    for notice in report.notices:
        yield f"note: {notice}"


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
