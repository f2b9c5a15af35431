"""Print the results of commands: as one JSON object, or as lines for people."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import click

from ckptstore.checkpoint import Checkpoint
from ckptstore.events import CheckpointSkipped, Event, listening
from ckptstore.format.encoding import dump_json
from ckptstore.runtime.shown import printable
from ckptstore.storage.uri import redact
from ckptstore.tools.cli.terminal import is_terminal, print_table

_SECRET_OPTIONS = ("--storage-option", "--target-option")


def print_json(**fields: Any) -> None:
    """Print one JSON object, with the version of its schema; a float that JSON lacks as in the store format."""
    click.echo(json.dumps(_plain(fields), indent=2))


def print_json_line(**fields: Any) -> None:
    """Print one JSON object on one line."""
    click.echo(json.dumps(_plain(fields)))


def _plain(fields: Mapping[str, Any]) -> Any:
    return json.loads(dump_json({"version": 1, **fields}, what="the output"))


def redacted_command_line() -> str:
    """Return the command line without the values of storage options and without secrets in URIs."""
    words: list[str] = []
    for word in sys.argv[1:]:
        is_value = words[-1:] != [] and words[-1] in _SECRET_OPTIONS
        option, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
        if is_value or (equals and option in _SECRET_OPTIONS):
            words.append(f"{word.partition('=')[0]}=...")
        else:
            words.append(f"{option}{equals}{redact(value)}")
    return shlex.join(["ckptstore", *words])


def checkpoint_json(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the fields of a checkpoint that every command prints."""
    return {
        "step": checkpoint.step,
        "number": checkpoint.number,
        "kind": checkpoint.kind,
        "created_at": checkpoint.created_at,
        "world_size": checkpoint.world_size,
        "size_bytes": checkpoint.size_bytes,
        "metrics": checkpoint.metrics,
        "uri": checkpoint.uri,
    }


def echo_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows below headers, aligned; a column of numbers to the right."""
    right = [all(_is_number(row[index]) for row in rows) for index, _ in enumerate(headers)]
    if is_terminal(sys.stdout):
        print_table(headers, rows, right=right)
        return
    widths = [max(len(row[index]) for row in [headers, *rows]) for index, _ in enumerate(headers)]
    for row in [headers, *rows]:
        cells = [
            cell.rjust(width) if is_right else cell.ljust(width)
            for cell, width, is_right in zip(row, widths, right, strict=True)
        ]
        click.echo("  ".join(cells).rstrip())


def _is_number(cell: str) -> bool:
    return cell[:1].isdigit() or cell == ""


def echo_fields(fields: Mapping[str, str]) -> None:
    """Print names and values, one to a line."""
    width = max(map(len, fields), default=0)
    for name, value in fields.items():
        click.echo(f"{name.ljust(width)}  {value}".rstrip())


def show_time(seconds: float) -> str:
    """Return a time for people, in UTC: "2026-11-20 12:00:05"."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")


def show_where(*, is_durable: bool, is_fast: bool) -> str:
    """Return the places of a checkpoint: the store, this node, or both."""
    return ", ".join([*(["store"] if is_durable else []), *(["node"] if is_fast else [])])


@contextmanager
def printing_skipped() -> Iterator[None]:
    """Print to stderr what is passed over while the context lasts."""

    def listener(event: Event) -> None:
        if isinstance(event, CheckpointSkipped):
            click.echo(f"left out: step {event.step}: {printable(event.reason)}", err=True)

    with listening(listener, CheckpointSkipped):
        yield


def show_metrics(metrics: Mapping[str, float]) -> str:
    """Return metrics for people: "loss=0.25 accuracy=0.9"."""
    return " ".join(f"{printable(name)}={value:.6g}" for name, value in metrics.items())
