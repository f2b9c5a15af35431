"""`ckptstore show`: one checkpoint with its files."""

from __future__ import annotations

import json
from typing import Any

import click

from ckptstore.checkpoint import Checkpoint
from ckptstore.cli.kinds import TARGET
from ckptstore.cli.options import as_json, storage_option
from ckptstore.cli.output import checkpoint_json, echo_fields, echo_table, print_json, show_metrics, show_time
from ckptstore.cli.targets import opened_checkpoint
from ckptstore.format.digest import to_hex
from ckptstore.format.manifest import Receipt
from ckptstore.runtime.shown import show_size


@click.command()
@click.argument("target", type=TARGET)
@storage_option
@as_json
def command(target: str, storage_options: dict[str, Any], as_json: bool) -> None:
    """Show one checkpoint: metrics, metadata and files. Of a store alone, its latest."""
    with opened_checkpoint(target, storage_options) as checkpoint:
        if as_json:
            files = [_to_json(receipt) for receipt in checkpoint.files]
            print_json(checkpoint=checkpoint_json(checkpoint), metadata=checkpoint.metadata, files=files)
            return
        _echo(checkpoint)


def _to_json(receipt: Receipt) -> dict[str, Any]:
    return {
        "name": receipt.name,
        "original_name": receipt.original_name or receipt.name,
        "rank": receipt.rank,
        "size_bytes": receipt.size_bytes,
        "crc32c": _digest(receipt) or None,
    }


def _echo(checkpoint: Checkpoint) -> None:
    fields = {
        "step": str(checkpoint.step),
        "number": "none, it lies outside of a store" if checkpoint.number is None else str(checkpoint.number),
        "uri": checkpoint.uri,
        "kind": checkpoint.kind,
        "created (UTC)": show_time(checkpoint.created_at),
        "ranks": str(checkpoint.world_size),
        "size": f"{show_size(checkpoint.size_bytes)} in {len(checkpoint.files)} files",
        "metrics": show_metrics(checkpoint.metrics),
    }
    fields |= {f"metadata.{name}": _shortened(value) for name, value in checkpoint.metadata.items()}
    echo_fields(fields)
    if checkpoint.files:
        click.echo()
        rows = [
            (receipt.name, str(receipt.rank), show_size(receipt.size_bytes), _digest(receipt) or "none")
            for receipt in checkpoint.files
        ]
        echo_table(("file", "rank", "size", "crc32c"), rows)


def _digest(receipt: Receipt) -> str:
    return "" if receipt.crc32c is None else to_hex(receipt.crc32c)


def _shortened(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 100 else f"{text[:97]}..."
