"""`ckptstore show`: one checkpoint with its files, its tensors, or what its save took."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import click

from ckptstore.checkpoint import Checkpoint, files_behind
from ckptstore.errors import InvalidInput
from ckptstore.format.digest import fields_of
from ckptstore.format.manifest import Receipt
from ckptstore.format.timings import Timings
from ckptstore.runtime.near import meant, nearest_key
from ckptstore.runtime.shown import show_size
from ckptstore.tools.cli.kinds import TARGET
from ckptstore.tools.cli.options import as_json, fast_option, storage_option, tier_at
from ckptstore.tools.cli.output import (
    checkpoint_json,
    echo_fields,
    echo_table,
    print_json,
    printing_skipped,
    provenance_texts,
    show_metrics,
    show_time,
)
from ckptstore.tools.cli.targets import opened_checkpoint

if TYPE_CHECKING:
    from ckptstore.loading.tensor_view import StoredTensor


@click.command()
@click.argument("target", type=TARGET, required=False, metavar="TARGET")
@click.option(
    "--tensors",
    "pattern",
    is_flag=False,
    flag_value="*",
    metavar="[PATTERN]",
    help="List tensors instead of files: all, or those whose keys match, such as 'model.*'.",
)
@click.option(
    "--timings",
    "with_timings",
    is_flag=True,
    help="Show how long the save took, by phase and by rank, instead of files.",
)
@fast_option
@storage_option
@as_json
def command(
    target: str | None,
    pattern: str | None,
    with_timings: bool,
    fast_path: str | None,
    storage_options: dict[str, Any],
    as_json: bool,
) -> None:
    """Show one checkpoint: its metrics, metadata and files.

    For a store without a step, that is its latest checkpoint. With --fast it may be on this node only; files that other
    nodes have are marked.
    """
    if target is None and pattern != "*":  # --tensors has taken the word after it
        target, pattern = pattern, "*"
    if target is None:
        raise click.UsageError("Missing argument 'TARGET'.")
    if with_timings and pattern is not None:
        raise InvalidInput("--tensors and --timings each take the place of the files", hint="Ask for one of them")
    with printing_skipped(), opened_checkpoint(target, storage_options, fast=tier_at(fast_path)) as checkpoint:
        tensors = _fitting(checkpoint, pattern)
        timings = _timings(checkpoint) if with_timings else None
        if as_json:
            on_node = _files_on_node(checkpoint)
            files = [_to_json(receipt, on_node) for receipt in checkpoint.files]
            provenance = checkpoint.provenance
            more: dict[str, Any] = {"is_durable": checkpoint.is_durable}
            more["provenance"] = None if provenance is None else provenance.to_json()
            more |= {} if tensors is None else {"tensors": [asdict(tensor) for tensor in tensors]}
            more |= {} if timings is None else {"timings": timings.to_json()}
            print_json(checkpoint=checkpoint_json(checkpoint), metadata=checkpoint.metadata, files=files, **more)
            return
        _echo_fields(checkpoint)
        if timings is not None:
            _echo_timings(timings)
        elif tensors is not None:
            _echo_tensors(tensors)
        else:
            _echo_files(checkpoint)


def _timings(checkpoint: Checkpoint) -> Timings:
    """Return the timings. Raises InvalidInput where there are none."""
    if checkpoint.timings is None:
        raise InvalidInput(
            f"Step {checkpoint.step} has no timings: it was saved by an older version of ckptstore, or by a newer one "
            "that writes them in another way",
            step=checkpoint.step,
        )
    return checkpoint.timings


def _fitting(checkpoint: Checkpoint, pattern: str | None) -> list[StoredTensor] | None:
    """Return the tensors that fit; None without patterns. Raises InvalidInput when none fits."""
    if pattern is None:
        return None
    found = [tensor for key, tensor in checkpoint.tensors.items() if fnmatchcase(key, pattern)]
    if not found and (pattern != "*" or len(checkpoint.tensors)):
        near = meant(nearest_key(pattern, list(checkpoint.tensors)))
        raise InvalidInput(f"No tensor of step {checkpoint.step} fits {pattern!r}{near}", step=checkpoint.step)
    return found


def _files_on_node(checkpoint: Checkpoint) -> frozenset[Receipt] | None:
    """Return the files of a fast checkpoint that this node has; None for one in a store, which has all."""
    files = files_behind(checkpoint)
    return frozenset(files.receipts_here(files.read_manifest()[0])) if files.is_on_nodes else None


def _to_json(receipt: Receipt, on_node: frozenset[Receipt] | None) -> dict[str, Any]:
    return {
        "name": receipt.name,
        "original_name": receipt.original_name or receipt.name,
        "rank": receipt.rank,
        "size_bytes": receipt.size_bytes,
        **fields_of(receipt.digest),
        "is_here": on_node is None or receipt in on_node,
    }


def _echo_fields(checkpoint: Checkpoint) -> None:
    fields = {
        "step": str(checkpoint.step),
        "number": _number(checkpoint),
        "uri": checkpoint.uri,
        "kind": checkpoint.kind,
        "created (UTC)": show_time(checkpoint.created_at),
        "ranks": str(checkpoint.world_size),
        "size": f"{show_size(checkpoint.size_bytes)} in {len(checkpoint.files)} files",
        "metrics": show_metrics(checkpoint.metrics),
    }
    if (thinned := checkpoint.thinned) is not None:
        fields["dropped"] = f"{', '.join(thinned.dropped)}, at {show_time(thinned.thinned_at)} (UTC)"
        fields["size before"] = show_size(thinned.size_bytes)
    fields |= {f"metadata.{name}": _shortened(value) for name, value in checkpoint.metadata.items()}
    fields |= provenance_texts(checkpoint)
    echo_fields(fields)


def _number(checkpoint: Checkpoint) -> str:
    if checkpoint.number is not None:
        return str(checkpoint.number)
    if not files_behind(checkpoint).is_on_nodes:
        return "none, it lies outside of a store"
    return "none yet, it came into the store just now" if checkpoint.is_durable else "none, it is on nodes alone"


def _echo_files(checkpoint: Checkpoint) -> None:
    on_node = _files_on_node(checkpoint)
    rows = [
        (
            receipt.name,
            str(receipt.rank),
            show_size(receipt.size_bytes),
            str(receipt.digest or "none"),
            *([] if on_node is None else ["yes" if receipt in on_node else "no"]),
        )
        for receipt in checkpoint.files
    ]
    if rows:
        click.echo()
        echo_table(("file", "rank", "size", "digest", *([] if on_node is None else ["here"])), rows)


def _echo_tensors(tensors: list[StoredTensor]) -> None:
    rows = [
        (
            tensor.key,
            tensor.dtype if tensor.dtype == tensor.live_dtype else f"{tensor.dtype} of {tensor.live_dtype}",
            "x".join(map(str, tensor.shape)) or "scalar",
            show_size(tensor.size_bytes),
            _ranges(tensor.ranks) + (", each its own" if tensor.is_per_rank else ""),
        )
        for tensor in tensors
    ]
    if rows:
        click.echo()
        echo_table(("tensor", "dtype", "shape", "size", "ranks"), rows)


def _echo_timings(timings: Timings) -> None:
    click.echo()
    echo_fields(
        {
            "until the manifest": _seconds(timings.seconds),
            "uploaded": f"{show_size(timings.size_bytes)} in {timings.requests} requests, {timings.retries} retries",
        }
    )
    nodes = {one.rank: one.node for one in timings.ranks}
    spreads = {**timings.phases, "stalled": timings.stalled}
    click.echo()
    echo_table(
        ("phase", "shortest", "median", "longest", "longest on"),
        [
            (
                name,
                *map(_seconds, (spread.minimum, spread.median, spread.maximum)),
                ", ".join(f"rank {rank} on {nodes.get(rank, 'an unknown node')}" for rank in spread.slowest),
            )
            for name, spread in spreads.items()
        ],
    )
    click.echo()
    echo_table(
        ("rank", "node", *timings.phases, "stalled", "uploaded", "requests", "retries"),
        [
            (
                str(one.rank),
                one.node,
                *(_seconds(one.seconds[phase]) if phase in one.seconds else "" for phase in timings.phases),
                _seconds(one.stalled_seconds),
                show_size(one.size_bytes),
                str(one.requests),
                str(one.retries),
            )
            for one in timings.ranks
        ],
    )


def _seconds(seconds: float) -> str:
    return f"{seconds:.3f} s"


def _ranges(numbers: Sequence[int]) -> str:
    """Show numbers in their order, without those between: "0-3, 5"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _shortened(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 100 else f"{text[:97]}..."
